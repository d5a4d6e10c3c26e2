"""How far quantized weights and caches move the next token's distribution: mean KL divergence from
the float32 path over 2,000 tokens of real text (this project's own), beside llama.cpp's on the same
file."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.engine_child import PEERS, ROOT
from bench.figures import Figure, figure
from bench.kl import mean_kl
from core.config import Config, EngineConfig
from core.environment import child_environment
from core.ids import BlockId, SlotId
from core.sampling_params import SamplingParams
from deploy.model_path import resolve_model
from deploy.worker.replica import load_executor, plan_replica
from engine.executor.interface import SlotAdded, SlotWork, StepPlan
from kv_transfer.region import HostRegion
from router.text.text_model import TextModel

NUM_TOKENS = 2000
_CHUNK = 500
_TEXTS = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")

VARIANTS = (
    ("kv_bf16", "f32", "bf16", 1e-4),
    ("kv_int8", "f32", "int8", 5e-4),
    ("weights_bf16", "bf16", "f32", 0.02),
    ("weights_int8", "int8", "f32", 0.02),
    ("weights_native", "native", "f32", 0.02),
    ("default", "auto", "auto", 0.02),
)
"""Name, engine.weights, engine.kv_dtype, largest mean KL in nats."""


def run() -> Iterator[Figure]:
    """Yield each variant's KL, and llama.cpp's where it is installed."""
    model = resolve_model("")
    tokens = _real_text(model)
    with tempfile.TemporaryDirectory() as directory:
        reference = Path(directory) / "logits.npy"
        np.save(reference, _logits(model, tokens, "f32", "f32"))
        wanted: Any = np.load(reference, mmap_mode="r")
        measured = {
            name: mean_kl(wanted, _logits(model, tokens, weights, kv))
            for name, weights, kv, _ in VARIANTS
        }
        peer = _llama_kl(model, tokens, reference) if PEERS.exists() else None
    for name, _, _, largest in VARIANTS:
        at_most = largest
        if peer is not None and name in ("weights_int8", "weights_native"):
            at_most = min(largest, peer)
        yield figure(
            f"accuracy.{name}",
            [measured[name]],
            "nats",
            against="mean KL from f32" + (", llama.cpp's" if at_most == peer else ""),
            at_most=at_most,
        )
    if peer is not None:
        yield figure("accuracy.llama_q4_1", [peer], "nats", against="mean KL from f32")


def _real_text(model: Path) -> Sequence[int]:
    text = "\n".join((ROOT / name).read_text() for name in _TEXTS)
    tokens = TextModel.load(model).encode(text, add_special_tokens=False)[:NUM_TOKENS]
    assert len(tokens) == NUM_TOKENS
    return tokens


def _logits(model: Path, tokens: Sequence[int], weights: str, kv: str) -> Any:
    """Return float32 [tokens, vocab_size]: each position's scores of the next token."""
    choices = {"weights": weights, "kv_dtype": kv, "kv_memory": 256 << 20, "threads": 2}
    config = Config(engine=msgspec.convert(choices, EngineConfig))
    plan = plan_replica(config, model)
    with contextlib.closing(HostRegion(plan.num_blocks * plan.layout.block_bytes)) as region:
        executor: Any = load_executor(config, plan, model, region)
        parts: list[Any] = []
        with contextlib.closing(executor):
            slot = SlotId(0)
            for number, first in enumerate(range(0, len(tokens), _CHUNK)):
                added = SlotAdded(
                    slot=slot,
                    token_ids=tokens,
                    num_prompt=len(tokens),
                    num_computed=0,
                    block_tables=(
                        tuple(BlockId(i) for i in range(plan.layout.blocks_for(len(tokens)))),
                    ),
                    sampling=SamplingParams(max_tokens=1),
                )
                count = min(_CHUNK, len(tokens) - first)
                step = StepPlan(
                    number=number,
                    added=(added,) if not number else (),
                    work=(SlotWork(slot, count, 0),),
                )
                parts.append(np.array(executor.logits_of(step), np.float32))
        return np.concatenate(parts)


def _llama_kl(model: Path, tokens: Sequence[int], reference: Path) -> float:
    listed = reference.with_name("tokens.npy")
    np.save(listed, np.array(tokens, np.int32))
    command = [str(PEERS), "-m", "bench.peer_llama_kl", str(model), str(listed), str(reference)]
    environment = {**child_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(  # noqa: S603 - our own command
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    return float(done.stdout.split()[-1])
