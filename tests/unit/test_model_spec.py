"""Specs and their refusals, without torch and without weights."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from core.errors import ModelError
from core.kv_layout import KvDtype
from deploy.model_path import resolve_model
from engine.models.families import FAMILIES
from engine.models.read_spec import read_spec
from engine.models.rope_scaling import Llama3Scaling, YarnScaling
from engine.models.spec import kv_dtype_for, kv_layout_for
from tests.tiny_models import llama3_scaling

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "eos_token_id": [3, 4],
}


def write_directory(path: Path, config: dict[str, Any], payload: bytes = bytes(range(16))) -> Path:
    """Write a directory whose only tensor is two by two; enough for a spec."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    content = struct.pack("<Q", len(header)) + header + payload
    (path / "model.safetensors").write_bytes(content)
    return path


def test_smollm2_as_its_header_says() -> None:
    spec = read_spec(resolve_model(""))
    assert (spec.name, spec.num_layers, spec.hidden_size) == ("SmolLM2-135M-Instruct", 30, 576)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.intermediate_size, spec.vocab_size, spec.max_positions) == (1536, 49_152, 8192)
    assert (spec.rope_theta, spec.norm_eps, spec.tied_embeddings) == (100_000.0, 1e-5, True)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert kv_layout_for(spec, KvDtype.BF16, 16).block_bytes == 360 * 1024


def test_reading_a_spec_imports_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from engine.models.read_spec import read_spec;"
        f"read_spec(Path({str(resolve_model(''))!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hugging_face_defaults_and_lists(tmp_path: Path) -> None:
    spec = read_spec(write_directory(tmp_path / "tiny", CONFIG))
    assert (spec.name, spec.num_kv_heads, spec.head_dim, spec.rope_theta) == ("tiny", 2, 4, 1e4)
    assert spec.eos_token_ids == (3, 4)
    assert not spec.tied_embeddings


def test_generation_config_adds_its_eos(tmp_path: Path) -> None:
    write_directory(tmp_path, CONFIG)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert read_spec(tmp_path).eos_token_ids == (9, 3, 4)


def test_rope_theta_in_the_new_place(tmp_path: Path) -> None:
    parameters = {"rope_theta": 5e5, "rope_type": "default"}
    spec = read_spec(write_directory(tmp_path, CONFIG | {"rope_parameters": parameters}))
    assert spec.rope_theta == 5e5


def test_what_a_configuration_leaves_unsaid_is_the_familys(tmp_path: Path) -> None:
    """transformers writes and reads these defaults; they differ from family to family."""
    said = {"hidden_size": 128, "num_attention_heads": 64, "num_hidden_layers": 64}
    for model_type in ("llama", "mistral", "qwen2", "qwen3", "smollm3"):
        theirs: Any = AutoConfig.for_model(model_type, **said)
        silent = {
            "model_type": model_type,
            "architectures": [FAMILIES[model_type].model_class],
            **said,
            "intermediate_size": 8,
            "vocab_size": 9,
        }
        spec = read_spec(write_directory(tmp_path, silent))
        # Class defaults that the class itself then derives from the sizes.
        assert spec.num_kv_heads == theirs.num_key_value_heads
        assert spec.head_dim == (getattr(theirs, "head_dim", None) or 2)
        assert spec.max_positions == theirs.max_position_embeddings
        assert spec.tied_embeddings == theirs.tie_word_embeddings
        assert spec.rope_theta == theirs.rope_parameters["rope_theta"]
        assert spec.norm_eps == theirs.rms_norm_eps
        assert spec.sliding_window == getattr(theirs, "sliding_window", None)
        rotates = getattr(theirs, "no_rope_layers", [1] * 64)
        assert spec.nope_layers == tuple(i for i in range(64) if not rotates[i])
        assert spec.qkv_bias == (model_type == "qwen2")
        assert spec.qk_norm == (model_type == "qwen3")


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    config = CONFIG | {"max_position_embeddings": 1000, "rope_scaling": yarn}
    spec = read_spec(write_directory(tmp_path, config))
    assert spec.max_positions == 4000
    stated = config | {"max_position_embeddings": 4000, "rope_scaling": yarn | {"factor": None}}
    again = read_spec(write_directory(tmp_path, stated))
    assert (again.max_positions, again.rope_scaling) == (4000, spec.rope_scaling)
    without = config | {"rope_scaling": {"type": "yarn", "factor": 0.5}}
    kept = read_spec(write_directory(tmp_path, without)).rope_scaling
    assert kept == YarnScaling(0.5, 1000, attention_factor=1.0)


def test_rope_parameters_may_stand_beside_them(tmp_path: Path) -> None:
    """As in Phi's and older files; transformers lets the outer one win."""
    scaling = llama3_scaling(64) | {"finetuned": True}
    config = CONFIG | {"rope_scaling": scaling, "original_max_position_embeddings": 32}
    spec = read_spec(write_directory(tmp_path, config))
    assert spec.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 32)


def yarn(**fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **fields}}


QWEN2 = {"num_key_value_heads": 1, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {
    "num_key_value_heads": 1,
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
}
SMOLLM3 = {
    "num_key_value_heads": 1,
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
}
SLIDING = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma2"}, "model_type = 'gemma2' .*only llama, mistral, qwen2, qwen3, sm"),
        ({"model_type": None}, "model_type = None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' .*only default, dynamic, linear"),
        ({"rope_parameters": {"type": "su"}}, "rope_type = 'su'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "missing required field `factor`"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "> 0.*factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {"rope_scaling": llama3_scaling(64, high_freq_factor=1.0)},
            "low_freq_factor = 1.0 .*less than high_freq_factor",
        ),
        (yarn(long_factor=[1.0]), "long_factor"),
        (yarn(beta_fast=-1), "beta_fast"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": 0.5}, "rope_theta = 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 .*only 1.0"),
        ({"sliding_window": 4096}, "sliding_window = 4096 .*only null"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window"),
        (
            MISTRAL | {"sliding_window": 8, "layer_types": ["full_attention"]},
            "layer_types .*sliding_window = 8",
        ),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"]}, "layer_types"),
        (QWEN2 | SLIDING | {"layer_types": ["full_attention"] * 2}, "layer_types .*only 1 entries"),
        (QWEN2 | {"layer_types": ["sliding_attention"]}, "layer_types .*sliding_window = None"),
        ({"no_rope_layers": [0]}, "no_rope_layers = .0. .*a list of ones"),
        (SMOLLM3 | {"no_rope_layers": []}, "no_rope_layers = .. .*1 entries"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'quant_method': 'awq'. is"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 .*only 0"),
        ({"use_parallel_residual": True}, "use_parallel_residual = True .*only False"),
        ({"num_local_experts": 8}, "num_local_experts = 8 .*only 0"),
        ({"attention_sinks": 4}, "attention_sinks = 4"),
        ({"query_pre_attn_scalar": 224}, "query_pre_attn_scalar = 224 .*only null"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"head_dim": 3}, "head_dim = 3"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    write_directory(tmp_path, CONFIG | change)
    with pytest.raises(ModelError, match=named) as caught:
        read_spec(tmp_path)
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value) or "do not divide" in named or "head_dim" in named


def test_values_that_change_nothing_are_taken(tmp_path: Path) -> None:
    harmless = {
        "hidden_act": "swish",
        "num_experts": 0,
        "attn_logit_softcapping": None,
        "sliding_window": None,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "pretraining_tp": 1,
        "layer_types": ["full_attention"],
        "no_rope_layers": [1],
    }
    plain = read_spec(write_directory(tmp_path, CONFIG))
    assert read_spec(write_directory(tmp_path, CONFIG | harmless)) == plain
    unused = QWEN2 | {"use_sliding_window": False, "sliding_window": 8}
    assert read_spec(write_directory(tmp_path, CONFIG | unused)).window_of(0) is None
    sliding = CONFIG | MISTRAL | {"sliding_window": 8, "layer_types": ["sliding_attention"]}
    assert read_spec(write_directory(tmp_path, sliding)).window_of(0) == 8


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_spec(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ModelError, match="is neither"):
        read_spec(tmp_path / "notes.txt")
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match=r"model\.safetensors: missing"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"", "not a safetensors file"), (b"\xff" * 64, "not a safetensors file"),
     (struct.pack("<Q", 4) + b"nope", "damaged")],
)  # fmt: skip
def test_damaged_safetensors(tmp_path: Path, content: bytes, named: str) -> None:
    write_directory(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=named):
        read_spec(tmp_path)


def test_a_type_of_element_that_is_not_supported(tmp_path: Path) -> None:
    path = write_directory(tmp_path, CONFIG) / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F64"'))
    with pytest.raises(ModelError, match="tensor w is F64; supported types are BF16, F16, F32"):
        read_spec(tmp_path)


def test_files_that_are_no_json(tmp_path: Path) -> None:
    write_directory(tmp_path, CONFIG)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(ModelError, match=r"generation_config.json: Expected .*eos_token_id"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: .*truncated"):
        read_spec(tmp_path)


def test_a_safetensors_file_cut_short(tmp_path: Path) -> None:
    write_directory(tmp_path, CONFIG, payload=bytes(15))
    with pytest.raises(ModelError, match="cut short: tensor w"):
        read_spec(tmp_path)


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    write_directory(tmp_path, CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    with pytest.raises(ModelError, match=r"a\.safetensors: missing"):
        read_spec(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="not an index"):
        read_spec(tmp_path)


def test_fingerprints_name_weights_and_arithmetic(tmp_path: Path) -> None:
    one = read_spec(write_directory(tmp_path / "one", CONFIG)).fingerprint
    moved = read_spec(write_directory(tmp_path / "two", CONFIG)).fingerprint
    tuned = read_spec(write_directory(tmp_path / "three", CONFIG, payload=bytes(16))).fingerprint
    other_eps = CONFIG | {"rms_norm_eps": 1e-5}
    eps = read_spec(write_directory(tmp_path / "four", other_eps)).fingerprint
    longer = CONFIG | {"max_position_embeddings": 99}
    context = read_spec(write_directory(tmp_path / "five", longer)).fingerprint
    assert one == moved == context
    assert len({one, tuned, eps}) == 3
    assert len(one) == 32


def test_kv_dtype_auto_is_bf16() -> None:
    assert kv_dtype_for("auto") == kv_dtype_for("bf16") == KvDtype.BF16
    assert kv_dtype_for("f32") == KvDtype.F32
