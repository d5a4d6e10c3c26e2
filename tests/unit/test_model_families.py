"""Every family against transformers: logits of one chunk, of small ones, and of decodes.

Both compute in float32 on the same weights, with logits of up to 7; what differs is the order of
sums. The largest difference measured over this table is 1.1e-5, a tenth of the tolerance, and any
part that is left out moves logits by more than 0.1 (`test_each_part_matters`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from core.config import EngineConfig
from engine.models.read_spec import read_spec
from tests.step_driver import EXACT, NATIVE, StepDriver, work
from tests.tiny_models import TOKENS, llama3_scaling, reference, save_tiny

TOLERANCE = 1e-4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MHA = {"num_key_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-2": MHA | {"tie_word_embeddings": False},
    "llama-2-linear": MHA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-2-dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama-3": {"rope_parameters": llama3_scaling(64), "shard_size": "20KB"},
    "llama-3-tied": {"rope_parameters": llama3_scaling(32), "tie_word_embeddings": True},
    "llama-yarn": {"rope_scaling": YARN},
    "llama-yarn-scales": {
        "rope_scaling": YARN
        | {"mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False, "beta_fast": 8, "beta_slow": 2},
        "head_dim": 16,
    },
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-bf16": {"dtype": torch.bfloat16, "attention_bias": True},
    "llama-f16": {"dtype": torch.float16, "num_key_value_heads": 1},
    "smollm2": {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 72,
        "tie_word_embeddings": True,
        "rope_theta": 1e5,
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 21},
    "mistral-window-of-a-tile": {"model_type": "mistral", "sliding_window": 64},
    "mistral-window-beyond": {"model_type": "mistral", "sliding_window": 4096},
    "mistral-window-1": {"model_type": "mistral", "sliding_window": 1, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_scaling": YARN},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
    "qwen3-biases": {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 30,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": True},
    "smollm3-chosen": {
        "model_type": "smollm3",
        "no_rope_layers": [0, 1],
        "mlp_bias": True,
        "use_sliding_window": True,
        "sliding_window": 50,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = save_tiny(tmp_path, **FAMILIES[family])
    expected = reference(model, TOKENS)
    for config in (EXACT, NATIVE):
        driver = StepDriver(tmp_path, num_blocks=64, config=config)
        for size, num_decodes in ((150, 0), (7, 0), (16, 0), (64, 0), (90, 60)):
            ours = driver.chunked_logits(TOKENS, size, num_decodes)
            torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0.0)
        driver.close()


@pytest.mark.parametrize("family", ["llama-biases", "qwen3-biases", "smollm3-chosen"])
def test_in_bf16_logits_stay_near(tmp_path: Path, family: str) -> None:
    """The default arithmetic where a processor has it: every op takes it, and rounds to 8 bits."""
    model = save_tiny(tmp_path, **FAMILIES[family])
    driver = StepDriver(tmp_path, num_blocks=64, config=EngineConfig(weights="bf16", threads=1))
    difference = (driver.chunked_logits(TOKENS, 90, 60) - reference(model, TOKENS)).abs()
    driver.close()
    assert 1e-3 < difference.max() < 0.5
    assert difference.mean() < 0.05


@pytest.mark.parametrize(
    ("family", "without"),
    [
        ("llama-2-linear", {"rope_scaling": None}),
        ("llama-3", {"rope_scaling": None}),
        ("llama-yarn", {"rope_scaling": None}),
        ("mistral-window", {"sliding_layers": ()}),
        ("qwen2-window", {"sliding_layers": (0, 1)}),
        ("smollm3", {"nope_layers": ()}),
    ],
)
def test_each_part_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, without: dict[str, Any]
) -> None:
    """A model that leaves the part out is far from the reference: its test would fail."""
    model = save_tiny(tmp_path, **FAMILIES[family])
    poorer = replace(read_spec(tmp_path), **without)
    monkeypatch.setattr("tests.step_driver.read_spec", lambda _: poorer)
    driver = StepDriver(tmp_path, num_blocks=64)
    difference = (driver.chunked_logits(TOKENS, 64) - reference(model, TOKENS)).abs().max()
    driver.close()
    assert difference > 0.1


def test_a_layer_with_a_window_reads_nothing_before_it(tmp_path: Path) -> None:
    """What a window has left behind has no weight at all, not a small one."""
    save_tiny(tmp_path, model_type="mistral", sliding_window=20, num_hidden_layers=1)
    driver = StepDriver(tmp_path, num_blocks=64)
    logits: list[Tensor] = []
    for slot, first in enumerate((3, 90)):
        tokens = [first, *TOKENS[1:]]
        chunk = driver.logits(work(slot, 140), added=(driver.added(slot, tokens),))
        logits.append(torch.cat((chunk, driver.logits(work(slot, 1)))))
    driver.close()
    assert not torch.equal(logits[0][19], logits[1][19])
    assert torch.equal(logits[0][20:], logits[1][20:])


def test_fingerprints_tell_all_parts_apart(tmp_path: Path) -> None:
    """Same weights, other arithmetic: workers of such models must not exchange blocks."""
    changes: list[dict[str, Any]] = [
        {},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"attention_factor": 1.0}},
        {"rope_scaling": llama3_scaling(64)},
        {"rope_scaling": llama3_scaling(32)},
        {"rope_theta": 2e4},
        {"sliding_window": 64},
        {"sliding_window": 32},
        {"rms_norm_eps": 1e-4},
    ]
    names: set[str] = set()
    for index, change in enumerate(changes):
        fields: dict[str, Any] = {"model_type": "mistral", "sliding_window": None} | change
        save_tiny(tmp_path / str(index), **fields)
        names.add(read_spec(tmp_path / str(index)).fingerprint)
    assert len(names) == len(changes)
    spec = read_spec(tmp_path / "0")
    others = [
        replace(spec, **part)
        for part in (
            {"qk_norm": True},
            {"qkv_bias": True},
            {"output_bias": True},
            {"mlp_bias": True},
            {"nope_layers": (1,)},
            {"sliding_window": 8, "sliding_layers": (1,)},
        )
    ]
    assert len({other.arithmetic() for other in (spec, *others)}) == 7
