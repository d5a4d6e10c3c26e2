"""GGUF files of the llama architecture: metadata -> ModelSpec, and GGUF's tensor names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from core.errors import ModelError
from engine.models.fingerprint import fingerprint
from engine.models.gguf_file import GgufHeader, read_header
from engine.models.spec import ModelSpec

T = TypeVar("T", int, float, str)

_QUANTIZATION_SUFFIX = re.compile(r"[.-](F32|F16|BF16|Q\d\w*)$", re.IGNORECASE)

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_name(name: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor, or None for one that llama does not have."""
    if name in _NAMES:
        return _NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    kind, _, suffix = part.partition(".")
    if prefix != "blk" or kind not in _LAYER_NAMES or suffix != "weight":
        return None
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"


def read_gguf(path: Path) -> ModelSpec:
    """Read what the header says.

    Raises:
        ModelError: not GGUF, or the model has a part that is not implemented.
    """
    header = read_header(path)
    _refuse_unsupported(path, header)
    meta = _Metadata(path, header)
    num_heads = meta.need("llama.attention.head_count", int)
    hidden = meta.need("llama.embedding_length", int)
    head_dim = meta.get("llama.attention.key_length", hidden // num_heads)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    embedding = shapes.get("token_embd.weight", (meta.get("llama.vocab_size", 0),))
    eos = [meta.get(f"tokenizer.ggml.{key}_token_id", -1) for key in ("eos", "eot")]
    bos = meta.get("tokenizer.ggml.bos_token_id", -1)
    spec = ModelSpec(
        name=_QUANTIZATION_SUFFIX.sub("", path.stem),
        architecture="llama",
        num_layers=meta.need("llama.block_count", int),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=meta.get("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=meta.need("llama.feed_forward_length", int),
        vocab_size=embedding[0],
        rope_theta=meta.get("llama.rope.freq_base", 10_000.0),
        norm_eps=_shortest_f32(meta.need("llama.attention.layer_norm_rms_epsilon", float)),
        tied_embeddings="output.weight" not in shapes,
        max_positions=meta.need("llama.context_length", int),
        bos_token_id=None if bos < 0 else bos,
        eos_token_ids=tuple(dict.fromkeys(i for i in eos if i >= 0)),
        activation="silu",
        fingerprint="",
    )
    name = fingerprint([(path, header.tensors)], spec.arithmetic())
    return msgspec.structs.replace(spec, fingerprint=name)


class _Metadata:
    """Typed access to a header's metadata."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path = path
        self._values = header.metadata

    def get(self, key: str, default: T) -> T:
        """Return the value of the default's type, or the default where the key is missing."""
        return self.need(key, type(default)) if key in self._values else default

    def need(self, key: str, wanted: type[T]) -> T:
        """Return the value, which the model cannot do without."""
        value = self._values.get(key)
        if not isinstance(value, wanted):
            msg = f"{self._path}: metadata {key} = {value!r}; needed as {wanted.__name__}"
            raise ModelError(msg)
        return value


def _refuse_unsupported(path: Path, header: GgufHeader) -> None:
    meta = header.metadata
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        msg = f"{path}: architecture {architecture!r} is not supported, only 'llama'"
        raise ModelError(msg)
    scaling = meta.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        msg = f"{path}: rope scaling {scaling!r} is not supported, only 'none'"
        raise ModelError(msg)
    for key in ("llama.attention.sliding_window", "llama.expert_count"):
        if meta.get(key):
            msg = f"{path}: {key} = {meta[key]!r} is not supported, only 0"
            raise ModelError(msg)
    for tensor in header.tensors:
        if hugging_face_name(tensor.name) is None:
            msg = f"{path}: tensor {tensor.name} is not part of a plain llama; not supported"
            raise ModelError(msg)


def _shortest_f32(value: float) -> float:
    """Return the shortest decimal that rounds to the same f32: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
