"""Which files of a repository are needed. Pure.

Weights are safetensors or GGUF, never pickles: loading one runs whatever code it holds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from core.errors import ModelError
from deploy.hub.model_id import ModelId

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
_NEEDED = ("config.json", "tokenizer.json")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def text_files(names: Collection[str]) -> list[str]:
    """Return what a router needs of a repository of safetensors, as far as it is there."""
    return [name for name in _TEXT_FILES if name in names]


def wanted_gguf(model: ModelId, names: Collection[str]) -> str | None:
    """Return the GGUF file that is asked for; None: the repository's safetensors are.

    Raises:
        ModelError: there is none of that name, there are several, or it is cut into parts.
    """
    files = sorted(name for name in names if name.endswith(".gguf") and "mmproj" not in name)
    if model.gguf:
        found = [name for name in files if _is_named(name, model.gguf)]
    elif _SINGLE in names or INDEX in names or not files:
        return None
    else:
        found = files
    if len(found) == 1:
        return found[0]
    if found and all(_PART.search(name) for name in found):
        msg = (
            f"model {str(model)!r}: its GGUF file is cut into parts, which are not read; join them"
        )
        raise ModelError(msg)
    what = "several GGUF files" if found else "no such GGUF file"
    have = ", ".join(found or files) or "none"
    msg = f"model {str(model)!r}: {what}; give {model.repository}:FILE; it has {have}"
    raise ModelError(msg)


def check_safetensors(model: ModelId, names: Collection[str]) -> None:
    """Refuse a repository without safetensors, or without what makes a model of them.

    Raises:
        ModelError: says what it has, and what would be right.
    """
    if _SINGLE in names or INDEX in names:
        missing = [name for name in _NEEDED if name not in names]
        if missing:
            msg = f"model {str(model)!r}: has no {missing[0]}, without which it cannot be served"
            raise ModelError(msg)
        return
    pickles = sorted(name for name in names if name.endswith(_PICKLE_SUFFIXES))
    if pickles:
        msg = (
            f"model {str(model)!r}: has its weights as pickles only ({pickles[0]}), which run code "
            "when they are loaded; choose a repository or a revision with safetensors"
        )
    else:
        msg = f"model {str(model)!r}: has no {_SINGLE}, {INDEX} or GGUF file"
    raise ModelError(msg)


def weight_files(indexed: Iterable[str] | None) -> list[str]:
    """Return the safetensors files.

    Args:
        indexed: the shards that the index names; None where there is no index.
    """
    return [_SINGLE] if indexed is None else sorted(set(indexed))


def _is_named(name: str, wanted: str) -> bool:
    if wanted.lower().endswith(".gguf"):
        return name == wanted or name.endswith(f"/{wanted}")
    stem = _PART.sub(".gguf", name).removesuffix(".gguf").lower()
    return re.search(rf"(^|[-._/]){re.escape(wanted.lower())}$", stem) is not None
