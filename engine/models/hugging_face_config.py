"""The keys of `config.json` that are read, and refusal of those that would be left out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec

from core.errors import ModelError
from engine.models.families import FAMILIES, Family
from engine.models.rope_scaling import PositiveInt

T = TypeVar("T")

LayerType = Literal["full_attention", "sliding_attention"]


class HuggingFaceConfig(msgspec.Struct, frozen=True):
    """What is read; None: the family's default, or none.

    Attributes:
        rope_parameters, rope_scaling: see `hugging_face_rope`.
    """

    model_type: str
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: Annotated[float, msgspec.Meta(ge=0)] = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: PositiveInt | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: PositiveInt = 4
    tie_word_embeddings: bool | None = None
    max_position_embeddings: PositiveInt | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: PositiveInt | msgspec.UnsetType | None = msgspec.UNSET
    max_window_layers: int = 28
    layer_types: list[LayerType] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def family(self) -> Family:
        """Return the family's parts and defaults."""
        return FAMILIES[self.model_type]

    def max_positions(self) -> int:
        """Return the context that the configuration states."""
        return self.max_position_embeddings or self.family().max_positions


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (),
    "compression_config": (),
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "rope_interleaved": (False,),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "attn_logit_softcapping": (0, 0.0),
    "final_logit_softcapping": (0, 0.0),
    "logit_softcapping": (0, 0.0),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "attention_scale": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "attention_sinks": (False, 0),
    "sinks": (False, 0),
    "alibi": (False,),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "is_encoder_decoder": (False,),
}
"""Parts that the program does not have, with the values that say that the model has none either;
null, or a missing key, always does."""


def read_config(directory: Path) -> HuggingFaceConfig:
    """Read `config.json`.

    Raises:
        ModelError: missing or damaged; or a family, or a part of it, that is not implemented.
    """
    path = directory / "config.json"
    raw = decode_file(path, dict[str, Any])
    _refuse_family(path, raw)
    for key, neutral in _NEUTRAL.items():
        value = raw.get(key)
        if value is not None and value not in neutral:
            raise unsupported(path, key, value, repr(neutral[0]) if neutral else "null")
    try:
        return msgspec.convert(raw, HuggingFaceConfig)
    except msgspec.ValidationError as error:
        msg = f"{path}: {error}"
        raise ModelError(msg) from None


def decode_file(path: Path, wanted: type[T]) -> T:
    """Decode one of a model directory's JSON files.

    Raises:
        ModelError: missing, or not what is wanted.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=wanted)
    except FileNotFoundError:
        msg = (
            f"{path}: missing; a model is a Hugging Face directory (config.json, safetensors) "
            "or a GGUF file"
        )
        raise ModelError(msg) from None
    except msgspec.DecodeError as error:
        msg = f"{path}: {error}"
        raise ModelError(msg) from None


def unsupported(path: Path, key: str, value: object, supported: str) -> ModelError:
    """Return the refusal of one key's value."""
    if isinstance(value, dict):  # a quantization's own settings fill a screen
        named = cast("dict[str, object]", value)
        value = {name: named[name] for name in ("quant_method", "format") if name in named}
    return ModelError(f"{path}: {key} = {value!r} is not supported, only {supported}")


def _refuse_family(path: Path, raw: dict[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise unsupported(path, "model_type", model_type, ", ".join(FAMILIES))
    wanted = [FAMILIES[model_type].model_class]
    if raw.get("architectures") not in (None, wanted):
        raise unsupported(path, "architectures", raw["architectures"], repr(wanted))
