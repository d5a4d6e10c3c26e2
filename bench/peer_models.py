"""The default model in the forms that peers want: a Hugging Face directory and GGUF files of plain
floats, all of them exactly the weights that the quantized file means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from engine.models.read_spec import read_spec
from engine.models.torch_weights import open_tensors
from router.text.gguf_tokenizer import load_gguf


def hugging_face_directory(source: Path, directory: Path) -> Path:
    """Write float32 safetensors, a config and the tokenizer."""
    spec = read_spec(source)
    directory.mkdir(parents=True, exist_ok=True)
    weights = open_tensors(spec, source)
    tensors = {name: torch.as_tensor(weights[name]).contiguous() for name in weights}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied_embeddings,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_ids[0],
    }
    (directory / "config.json").write_text(json.dumps(config))
    load_gguf(source).tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


def plain_gguf(source: Path, target: Path, kind: str) -> Path:
    """Write a GGUF file whose quantized tensors are `kind`, "f32" or "bf16"; vectors stay f32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds: Any = field.types
            writer.add_key_value(
                name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None
            )
    for tensor in reader.tensors:
        values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if kind == "bf16" and values.ndim > 1:
            bits = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
