"""One entry for every kind of model file."""

from __future__ import annotations

from pathlib import Path

from core.errors import ModelError
from engine.models.gguf_file import is_gguf
from engine.models.gguf_model import read_gguf
from engine.models.hugging_face import read_directory
from engine.models.spec import ModelSpec


def read_spec(path: Path) -> ModelSpec:
    """Say what model lies at `path`, without torch and without reading its weights.

    Args:
        path: a Hugging Face directory or a GGUF file.

    Raises:
        ModelError: nothing there, not a model, or one that is not implemented; names what and what
            would be right.
    """
    if path.is_dir():
        spec = read_directory(path)
    elif path.is_file() and is_gguf(path):
        spec = read_gguf(path)
    else:
        found = "is neither" if path.exists() else "does not exist;"
        msg = (
            f"{path}: {found} a Hugging Face directory (config.json, safetensors) or a GGUF file "
            "is needed"
        )
        raise ModelError(msg)
    _check(path, spec)
    return spec


def _check(path: Path, spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        msg = (
            f"{path}: {spec.num_heads} attention heads do not divide among {spec.num_kv_heads} "
            "key-value heads"
        )
        raise ModelError(msg)
    if spec.head_dim % 2:
        msg = f"{path}: head_dim = {spec.head_dim} is odd, which rotary embeddings cannot use"
        raise ModelError(msg)
