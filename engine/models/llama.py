"""The program of the llama family (Touvron et al. 2023): pre-norm, RoPE, GQA, gated MLP."""

from __future__ import annotations

from engine.models.program import (
    Activation,
    Add,
    Attention,
    Embed,
    Linear,
    Logits,
    Norm,
    Op,
    Program,
    RopeKvWrite,
    SelectRows,
    Signal,
)
from engine.models.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"


def compile_program(spec: ModelSpec) -> Program:
    """Return the forward pass of a llama."""
    ops: list[Op] = [Embed(weight=EMBEDDING, out="residual")]
    for layer in range(spec.num_layers):
        ops += _attention(spec, layer)
        ops += _mlp(spec, layer)
    ops += [
        SelectRows(src="residual", out="selected"),
        Norm(src="selected", weight="model.norm.weight", eps=spec.norm_eps, out="hidden"),
        Logits(
            src="hidden",
            weight=EMBEDDING if spec.tied_embeddings else "lm_head.weight",
            out="logits",
        ),
    ]
    return Program(tuple(ops), hidden="hidden", logits="logits")


def _attention(spec: ModelSpec, layer: int) -> list[Op]:
    prefix = f"model.layers.{layer}"
    projections = tuple(f"{prefix}.self_attn.{name}_proj.weight" for name in "qkv")
    return [
        Norm("residual", f"{prefix}.input_layernorm.weight", spec.norm_eps, out="normed"),
        Linear("normed", projections, out="qkv"),
        RopeKvWrite("qkv", layer, out="queries"),
        Signal(layer),
        Attention("queries", layer, out="attended"),
        Linear("attended", (f"{prefix}.self_attn.o_proj.weight",), out="delta"),
        Add("delta", out="residual"),
    ]


def _mlp(spec: ModelSpec, layer: int) -> list[Op]:
    prefix = f"model.layers.{layer}"
    gate_up = tuple(f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    return [
        Norm("residual", f"{prefix}.post_attention_layernorm.weight", spec.norm_eps, out="normed"),
        Linear("normed", gate_up, out="gate_up"),
        Activation("gate_up", spec.activation, out="inner"),
        Linear("inner", (f"{prefix}.mlp.down_proj.weight",), out="delta"),
        Add("delta", out="residual"),
    ]
