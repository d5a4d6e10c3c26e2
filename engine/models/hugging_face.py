"""Hugging Face directories: config.json, generation_config.json and safetensors -> ModelSpec."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.models.fingerprint import fingerprint
from engine.models.hugging_face_config import (
    HuggingFaceConfig,
    decode_file,
    read_config,
    unsupported,
)
from engine.models.hugging_face_rope import read_rope
from engine.models.rope_scaling import stretched_context
from engine.models.safetensors_file import read_tensors, shard_paths
from engine.models.spec import ModelSpec


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def read_directory(directory: Path) -> ModelSpec:
    """Read what `config.json` and the safetensors headers say.

    Raises:
        ModelError: a file is missing or damaged, or the model has a part that is not implemented.
    """
    path = directory / "config.json"
    config = read_config(directory)
    shards = [(shard, read_tensors(shard)) for shard in shard_paths(directory)]
    family = config.family()
    heads, tied = config.num_attention_heads, config.tie_word_embeddings
    theta, scaling = read_rope(path, config)
    nope_layers = _nope_layers(path, config)
    window, sliding_layers = _sliding(path, config, nope_layers)
    spec = ModelSpec(
        name=directory.resolve().name,
        architecture=family.architecture,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads or family.num_kv_heads or heads,
        head_dim=config.head_dim or family.head_dim or config.hidden_size // heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rope_theta=theta,
        rope_scaling=scaling,
        nope_layers=nope_layers,
        norm_eps=config.rms_norm_eps,
        tied_embeddings=family.tied_embeddings if tied is None else tied,
        qkv_bias=family.qkv_bias or (family.reads_attention_bias and config.attention_bias),
        output_bias=family.reads_attention_bias and config.attention_bias,
        mlp_bias=family.reads_mlp_bias and config.mlp_bias,
        qk_norm=family.qk_norm,
        sliding_window=window,
        sliding_layers=sliding_layers,
        max_positions=stretched_context(config.max_positions(), scaling),
        bos_token_id=config.bos_token_id,
        eos_token_ids=_eos_token_ids(directory, config),
        activation="silu",
        fingerprint="",
    )
    return msgspec.structs.replace(spec, fingerprint=fingerprint(shards, spec.arithmetic()))


def _nope_layers(path: Path, config: HuggingFaceConfig) -> tuple[int, ...]:
    """Return the layers whose entry in `no_rope_layers` is 0: its name says the opposite."""
    rotates, interval = config.no_rope_layers, config.no_rope_layer_interval
    if not config.family().has_nope_layers:
        if rotates is not None and not all(rotates):
            raise unsupported(path, "no_rope_layers", rotates, "a list of ones")
        return ()
    if rotates is None:
        return tuple(range(interval - 1, config.num_hidden_layers, interval))
    if len(rotates) < config.num_hidden_layers:
        raise unsupported(path, "no_rope_layers", rotates, f"{config.num_hidden_layers} entries")
    return tuple(i for i in range(config.num_hidden_layers) if not rotates[i])


def _sliding(
    path: Path, config: HuggingFaceConfig, nope_layers: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...]]:
    """Return the window, and the layers that have it."""
    family, window = config.family(), config.sliding_window
    if window is msgspec.UNSET:
        window = family.sliding_window
    if family.windows == "none" and window is not None:
        raise unsupported(path, "sliding_window", window, "null")
    if family.windows == "chosen" and not config.use_sliding_window:
        window = None
    layers = _sliding_layers(path, config, window, nope_layers)
    return (window, layers) if layers else (None, ())


def _sliding_layers(
    path: Path, config: HuggingFaceConfig, window: int | None, nope_layers: tuple[int, ...]
) -> tuple[int, ...]:
    """Return transformers' choice: `layer_types` where it is given, else the family's rule."""
    num_layers, types = config.num_hidden_layers, config.layer_types
    every = range(num_layers)
    if window is None:
        by_rule: tuple[int, ...] = ()
    elif config.family().windows == "all":
        by_rule = tuple(every)
    elif config.family().has_nope_layers:
        by_rule = nope_layers
    else:
        by_rule = tuple(range(config.max_window_layers, num_layers))
    if types is None:
        return by_rule
    if len(types) != num_layers:
        raise unsupported(path, "layer_types", types, f"{num_layers} entries")
    named = tuple(i for i in every if types[i] == "sliding_attention")
    if named != by_rule and (window is None or config.family().windows != "chosen"):
        raise unsupported(path, "layer_types", types, f"those of sliding_window = {window}")
    return named


def _eos_token_ids(directory: Path, config: HuggingFaceConfig) -> tuple[int, ...]:
    declared = [config.eos_token_id]
    generation = directory / "generation_config.json"
    if generation.is_file():
        declared.insert(0, decode_file(generation, _GenerationConfig).eos_token_id)
    ids = [i for d in declared if d is not None for i in (d if isinstance(d, list) else [d])]
    return tuple(dict.fromkeys(ids))
