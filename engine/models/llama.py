"""The program of the llama family (Touvron et al. 2023): pre-norm, RoPE, GQA, gated MLP.

Llama, Mistral, Qwen2, Qwen3 and SmolLM3 are this one program: they differ in which projections have
biases, which layers rotate, whether heads are normalized, and how far a layer sees.
"""

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
    QkNorm,
    RopeKvWrite,
    SelectRows,
    Signal,
)
from engine.models.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"


def compile_program(spec: ModelSpec) -> Program:
    """Return the forward pass."""
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
    prefix = f"model.layers.{layer}.self_attn"
    return [
        Norm("residual", f"model.layers.{layer}.input_layernorm.weight", spec.norm_eps, "normed"),
        _linear("normed", [f"{prefix}.{kind}_proj" for kind in "qkv"], "qkv", bias=spec.qkv_bias),
        *_qk_norm(spec, prefix),
        RopeKvWrite("qkv", layer, out="queries", rotary=layer not in spec.nope_layers),
        Signal(layer),
        Attention("queries", layer, out="attended", window=spec.window_of(layer)),
        _linear("attended", [f"{prefix}.o_proj"], "delta", bias=spec.output_bias),
        Add("delta", out="residual"),
    ]


def _qk_norm(spec: ModelSpec, prefix: str) -> list[Op]:
    if not spec.qk_norm:
        return []
    return [
        QkNorm(
            src="qkv",
            query_weight=f"{prefix}.q_norm.weight",
            num_heads=spec.num_heads,
            key_weight=f"{prefix}.k_norm.weight",
            num_kv_heads=spec.num_kv_heads,
            eps=spec.norm_eps,
            out="qkv",
        )
    ]


def _mlp(spec: ModelSpec, layer: int) -> list[Op]:
    prefix = f"model.layers.{layer}"
    mlp, bias = f"{prefix}.mlp", spec.mlp_bias
    return [
        Norm("residual", f"{prefix}.post_attention_layernorm.weight", spec.norm_eps, "normed"),
        _linear("normed", [f"{mlp}.gate_proj", f"{mlp}.up_proj"], "gate_up", bias=bias),
        Activation("gate_up", spec.activation, out="inner"),
        _linear("inner", [f"{mlp}.down_proj"], "delta", bias=bias),
        Add("delta", out="residual"),
    ]


def _linear(src: str, modules: list[str], out: str, *, bias: bool) -> Linear:
    return Linear(
        src,
        weights=tuple(f"{module}.weight" for module in modules),
        out=out,
        biases=tuple(f"{module}.bias" for module in modules) if bias else (),
    )
