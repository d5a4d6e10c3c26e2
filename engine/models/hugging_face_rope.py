"""Rope parameters of `config.json` -> base and scaling.

transformers moved `rope_theta` and `rope_scaling` into `rope_parameters`; files of both ages exist,
and `type` was once the name of `rope_type`. The older key wins where both stand, as it does there.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from core.errors import ModelError
from engine.models.hugging_face_config import HuggingFaceConfig, unsupported
from engine.models.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    Positive,
    PositiveInt,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

R = TypeVar("R", bound="_Rope")

_TYPES = "default, dynamic, linear, llama3, yarn"


class _Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all types may say. Of these, `finetuned` changes nothing."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[float, msgspec.Meta(gt=1)] | None = None
    partial_rotary_factor: Annotated[float, msgspec.Meta(ge=1, le=1)] | None = None
    original_max_position_embeddings: PositiveInt | None = None
    finetuned: bool | None = None


class _Stretched(_Rope, frozen=True, kw_only=True):
    factor: Positive


class _Llama3(_Stretched, frozen=True, kw_only=True):
    low_freq_factor: Positive
    high_freq_factor: Positive


class _Yarn(_Rope, frozen=True, kw_only=True):
    """A missing `factor` is max_position_embeddings / original_max_position_embeddings."""

    factor: Positive | None = None
    attention_factor: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    truncate: bool = True


def read_rope(path: Path, config: HuggingFaceConfig) -> tuple[float, RopeScaling | None]:
    """Return the base and the scaling.

    "dynamic" scaling changes nothing within `max_position_embeddings`, and no sequence goes beyond.

    Args:
        path: of config.json, for messages.
        config: what it says.

    Raises:
        ModelError: a type, or a parameter of one, that is not supported.
    """
    raw = config.rope_scaling or config.rope_parameters or {}
    kind = raw.get("rope_type", raw.get("type")) or "default"
    theta = raw.get("rope_theta") or config.rope_theta or config.family().rope_theta
    scaling: RopeScaling | None = None
    match kind:
        case "default":
            _convert(path, raw, _Rope)
        case "dynamic":
            _convert(path, raw, _Stretched)
        case "linear":
            scaling = LinearScaling(_convert(path, raw, _Stretched).factor)
        case "llama3":
            scaling = _llama3(path, _convert(path, raw, _Llama3), config)
        case "yarn":
            scaling = _yarn(_convert(path, raw, _Yarn), config)
        case _:
            raise unsupported(path, "rope_type", kind, _TYPES)
    if not theta > 1:
        raise unsupported(path, "rope_theta", theta, "more than 1")
    return theta, scaling


def _convert(path: Path, raw: dict[str, Any], wanted: type[R]) -> R:
    try:
        return msgspec.convert(raw, wanted)
    except msgspec.ValidationError as error:
        msg = f"{path}: rope parameters {raw}: {error}"
        raise ModelError(msg) from None


def _original(rope: _Rope, config: HuggingFaceConfig) -> int:
    return (
        config.original_max_position_embeddings
        or rope.original_max_position_embeddings
        or config.max_positions()
    )


def _llama3(path: Path, rope: _Llama3, config: HuggingFaceConfig) -> Llama3Scaling:
    if rope.low_freq_factor >= rope.high_freq_factor:
        raise unsupported(
            path,
            "low_freq_factor",
            rope.low_freq_factor,
            f"less than high_freq_factor = {rope.high_freq_factor}",
        )
    return Llama3Scaling(
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_positions=_original(rope, config),
    )


def _yarn(rope: _Yarn, config: HuggingFaceConfig) -> YarnScaling:
    original = _original(rope, config)
    factor = rope.factor or config.max_positions() / original
    return YarnScaling(
        factor=factor,
        original_positions=original,
        attention_factor=rope.attention_factor or _attention_factor(rope, factor),
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        truncate=rope.truncate,
    )


def _attention_factor(rope: _Yarn, factor: float) -> float:
    """Return transformers' default; DeepSeek's two scales are a ratio."""
    if not (rope.mscale and rope.mscale_all_dim) or factor <= 1:
        return yarn_attention_factor(factor)
    log = 0.1 * math.log(factor)
    return (rope.mscale * log + 1.0) / (rope.mscale_all_dim * log + 1.0)
