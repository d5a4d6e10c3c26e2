"""GGUF files of tiny models, as llama.cpp's converter writes them from Hugging Face's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return GGUF's name of a Hugging Face tensor."""
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


def permute(weight: Tensor, num_heads: int) -> Tensor:
    """Interleave the halves of each head: LlamaModel.permute in convert_hf_to_gguf.py."""
    halves = weight.view(num_heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: Any,
    architecture: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Write a transformers model; matrices as `kind`, vectors as F32.

    The model's own matrices are then those that the file holds.

    Args:
        path: where to.
        model: its weights, in float32.
        architecture: whose names, and whether Q and K are permuted.
        kind: one that a file may have.
        metadata: more keys, or other values; one that is None is left out.
        extra: more tensors, F32.
    """
    config = model.config
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    keys: dict[str, Any] = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.rope.dimension_count": head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
    }
    writer = GGUFWriter(path, architecture)
    for key, value in (keys | (metadata or {})).items():
        add_value(writer, key, value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(config.vocab_size)])
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():  # a tied table is listed once
        weight, module = parameter.detach(), name.split(".")[-2]
        stored = kind if weight.dim() == 2 else GGMLQuantizationType.F32
        raw = torch.from_numpy(store(weight, stored))
        if architecture in ("llama", "smollm3") and module in heads:
            raw = permute(raw, heads[module])
        writer.add_tensor(gguf_name(name), raw.numpy(), raw_dtype=stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add one metadata value of the type that llama.cpp's converter gives it."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            assert value is None


def finish(writer: GGUFWriter) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def store(weight: Tensor, kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Encode a matrix, row by row, and set it to what the code means.

    The gguf package cannot encode the K types: these become random blocks with small scales.
    """
    if kind.name.endswith("_K"):
        raw = random_blocks(weight.shape[0], weight.shape[1], kind)
    else:
        raw = gguf.quants.quantize(weight.numpy(), kind)
    weight.copy_(torch.from_numpy(gguf.quants.dequantize(raw, kind)))
    return raw


def random_blocks(rows: int, width: int, kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Return uint8 [rows, bytes] that decode to values of about 0.1."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (rows, width // block, num_bytes), np.uint8)
    if kind.name == "Q6_K":
        raw[..., 208:] = np.array([5e-5], "<f2").view(np.uint8)
    else:  # the largest of q is 15 or 31: minima of half of it center the values
        scale = 4e-4 * 15 / (2 ** int(kind.name[1]) - 1)
        raw[..., :4] = np.array([scale, 7.5 * 4e-4], "<f2").view(np.uint8)
    return raw.reshape(rows, -1)
