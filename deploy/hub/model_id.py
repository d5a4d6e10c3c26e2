"""How a user names a model on a hub: ORG/NAME[@REVISION][:GGUF]. Pure."""

from __future__ import annotations

import re

import msgspec

_FORM = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(@(?P<revision>(?!/|[^:]*\.\.)[^:@\s]+))?"
    r"(:(?P<gguf>[^:@\s]+))?"
)


class ModelId(msgspec.Struct, frozen=True):
    """A model on a hub.

    Attributes:
        repository: ORG/NAME.
        revision: a branch, a tag or a commit.
        gguf: a file's name (`tiny.Q8_0.gguf`) or a quantization's (`Q8_0`); empty: safetensors, or
            the only GGUF file.
    """

    repository: str
    revision: str = "main"
    gguf: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repository}{revision}{self.gguf and ':'}{self.gguf}"


def parse_model_id(text: str) -> ModelId | None:
    """Return the model that `text` names; None where it can only be a path."""
    match = _FORM.fullmatch(text)
    if match is None or match["repository"].endswith(".gguf"):
        return None
    return ModelId(match["repository"], match["revision"] or "main", match["gguf"] or "")
