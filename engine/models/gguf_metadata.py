"""Typed access to a GGUF header's metadata, and refusal of what the program would leave out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeVar

from core.errors import ModelError
from engine.models.gguf_file import GgufHeader, Value

T = TypeVar("T", int, float, str)

_READ = frozenset({
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
})  # fmt: skip
_WITHOUT_EFFECT = frozenset({
    "tensor_data_layout",  # where the file came from
    "rope.scaling.finetuned",
    "attention.layer_norm_epsilon",  # of a norm that these models do not have
})  # fmt: skip
_NEUTRAL: dict[str, Value] = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "use_parallel_residual": False,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
"""Parts that the program does not have, with the value that says that the model has none either."""


class GgufMetadata:
    """One file's metadata.

    Args:
        path: for messages.
        header: of that file.

    Attributes:
        architecture: prefix of the model's own keys.
    """

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path = path
        self._values = header.metadata
        self.architecture = self.need("general.architecture", str)

    def own(self, key: str) -> str:
        """Return the full name of one of the model's own keys."""
        return f"{self.architecture}.{key}"

    def get(self, key: str, default: T) -> T:
        """Return the value of the default's type, or the default where the key is missing."""
        return self.need(key, type(default)) if key in self._values else default

    def need(self, key: str, wanted: type[T]) -> T:
        """Return the value, which the model cannot do without."""
        value = self._values.get(key)
        if not isinstance(value, wanted):
            raise self.error(key, value, f"needed as {wanted.__name__}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return one of the model's own sizes, at least 1."""
        name = self.own(key)
        value = self.need(name, int) if default is None else self.get(name, default)
        if value < 1:
            raise self.error(name, value, "must be at least 1")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Return one of the model's own numbers, finite and above 0.

        GGUF holds f32: the shortest decimal that rounds to the same one is what its author wrote
        (1e-05, not 9.999999747378752e-06).
        """
        name = self.own(key)
        value = self.need(name, float) if default is None else self.get(name, default)
        if not (math.isfinite(value) and value > 0):
            raise self.error(name, value, "must be above 0")
        return float(f"{value:.7g}")

    def refuse_unsupported(self) -> None:
        """Refuse every key of the model's own that would change a token and is not read here.

        Raises:
            ModelError: names the key, its value, and what is supported.
        """
        prefix = self.own("")
        for key, value in self._values.items():
            name = key.removeprefix(prefix)
            if not key.startswith(prefix) or name in _READ or name in _WITHOUT_EFFECT:
                continue
            if name not in _NEUTRAL:
                raise self.error(key, value, "not supported: not known what it would change")
            if value != _NEUTRAL[name]:
                raise self.error(key, value, f"not supported, only {_NEUTRAL[name]!r}")

    def error(self, key: str, value: object, why: str) -> ModelError:
        """Return the refusal of one value."""
        return ModelError(f"{self._path}: metadata {key} = {value!r}: {why}")
