"""Hugging Face directories: config.json, generation_config.json and safetensors -> ModelSpec."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from core.errors import ModelError
from engine.models.fingerprint import fingerprint
from engine.models.safetensors_file import read_tensors, shard_paths
from engine.models.spec import ModelSpec

T = TypeVar("T")


class _RopeParameters(msgspec.Struct):
    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None


class _HfConfig(msgspec.Struct):
    """The keys of config.json that we read; others are ignored, wrong types refused."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    architectures: list[str] | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: _RopeParameters | None = None
    rope_parameters: _RopeParameters | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    quantization_config: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def read_directory(directory: Path) -> ModelSpec:
    """Read what `config.json` and the safetensors headers say.

    Raises:
        ModelError: a file is missing or damaged, or the model has a part that is not implemented.
    """
    config = _decode(directory / "config.json", _HfConfig)
    _refuse_unsupported(directory, config)
    shards = [(path, read_tensors(path)) for path in shard_paths(directory)]
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    spec = ModelSpec(
        name=directory.resolve().name,
        architecture="llama",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rope_theta=_rope_theta(config),
        norm_eps=config.rms_norm_eps,
        tied_embeddings=config.tie_word_embeddings,
        max_positions=config.max_position_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_ids=_eos_token_ids(directory, config),
        activation="silu",
        fingerprint="",
    )
    return msgspec.structs.replace(spec, fingerprint=fingerprint(shards, spec.arithmetic()))


def _decode(path: Path, wanted: type[T]) -> T:
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


def _refuse_unsupported(directory: Path, config: _HfConfig) -> None:
    rope = config.rope_parameters or config.rope_scaling or _RopeParameters()
    rope_type = rope.rope_type or rope.type or "default"
    found = {
        "model_type": (config.model_type, "llama"),
        "architectures": (config.architectures or ["LlamaForCausalLM"], ["LlamaForCausalLM"]),
        "hidden_act": (config.hidden_act, "silu"),
        "rope_type": (rope_type, "default"),
        "sliding_window": (config.sliding_window, None),
        "attention_bias": (config.attention_bias, False),
        "mlp_bias": (config.mlp_bias, False),
        "quantization_config": (config.quantization_config, None),
    }
    for key, (value, wanted) in found.items():
        if value != wanted:
            msg = (
                f"{directory / 'config.json'}: {key} = {value!r} is not supported, only {wanted!r}"
            )
            raise ModelError(msg)


def _rope_theta(config: _HfConfig) -> float:
    nested = config.rope_parameters.rope_theta if config.rope_parameters else None
    return nested or config.rope_theta or 10_000.0


def _eos_token_ids(directory: Path, config: _HfConfig) -> tuple[int, ...]:
    declared = [config.eos_token_id]
    generation = directory / "generation_config.json"
    if generation.is_file():
        declared.insert(0, _decode(generation, _GenerationConfig).eos_token_id)
    ids = [i for d in declared if d is not None for i in (d if isinstance(d, list) else [d])]
    return tuple(dict.fromkeys(ids))
