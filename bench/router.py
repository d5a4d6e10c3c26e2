"""What a router costs and adds, on mock workers that compute nothing: requests a second on one
core, processor time a request and a chunk, and the latency over a worker that is asked directly.

vllm-router with prefill and decode upstreams is measured beside it, in turn, where it is installed
(`make bench-peers`). It hands bytes on where ours tokenizes, renders templates, and makes the text.
On a busy machine only processor times say anything.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import uvloop

from bench.figures import Figure, figure
from bench.router_direct import run_direct
from bench.router_load import PROMPT, Load, Measured, run_load
from bench.router_processes import PEER, Target, our_router, peer_router, two_cores
from deploy.model_path import resolve_model
from router.text.text_model import TextModel

CLIENTS = 64
ROUNDS = 5
ADDED_AIM_MS = 1.0
REQUESTS_AIM = 0.5
"""Of the peer's requests a second."""

ONE_TOKEN = Load(CLIENTS, (1, 1), 2.0)
CHAT = Load(CLIENTS, (1, 1), 2.0, chat=True)
PACED = Load(CLIENTS, (32, 96), 4.0, stream=True, pace_us=40_000)
UNPACED = Load(CLIENTS, (256, 256), 2.0, stream=True)

_NO_PEER = "vllm-router is not installed: make bench-peers"


class _Run:
    """One load on one router: what the client saw, and what the router used meanwhile."""

    def __init__(self, measured: Measured, cpu_s: float) -> None:
        self.measured = measured
        self.cpu_s = cpu_s

    @property
    def requests_per_s(self) -> float:
        return self.measured.num_requests / self.measured.seconds

    @property
    def us_per_request(self) -> float:
        return 1e6 * self.cpu_s / self.measured.num_requests

    @property
    def us_per_chunk(self) -> float:
        return 1e6 * self.cpu_s / self.measured.num_chunks


Runs = Mapping[str, Sequence[_Run]]


def run() -> Iterator[Figure]:
    """Yield our figures beside the peer's, and the aims."""
    with two_cores() as (router_core, _):
        yield from uvloop.run(_measure(router_core))


async def _measure(core: int) -> list[Figure]:
    async with contextlib.AsyncExitStack() as stack:
        ours = await stack.enter_async_context(our_router(core))
        targets = [ours]
        if (PEER / "vllm-router").exists():
            targets.append(await stack.enter_async_context(peer_router(core)))
        figures = _requests(await _in_turn(targets, ONE_TOKEN))
        chat = await _in_turn([ours], CHAT)
        figures += _each("router.chat_requests", chat, "requests/s", lambda run: run.requests_per_s)
        figures += _each("router.cpu_chat", chat, "us/request", lambda run: run.us_per_request)
        unpaced = await _in_turn(targets, UNPACED)
        figures += _each("router.cpu_unpaced", unpaced, "us/chunk", lambda run: run.us_per_chunk)
        figures += await _paced(targets)
    return figures


def _requests(runs: Runs) -> list[Figure]:
    figures = _each("router.requests", runs, "requests/s", lambda run: run.requests_per_s)
    figures += _each("router.cpu_request", runs, "us/request", lambda run: run.us_per_request)
    peer = runs.get("vllm_router")
    if peer is None:
        return [*figures, figure("router.requests.ratio", [0.0], "-", against=_NO_PEER)]
    pairs = list(zip(runs["dovetail"], peer, strict=True))
    for name, values in (
        ("requests", [ours.requests_per_s / its.requests_per_s for ours, its in pairs]),
        ("cpu", [its.us_per_request / ours.us_per_request for ours, its in pairs]),
    ):
        figures.append(
            figure(
                f"router.{name}.ratio",
                values,
                "ratio",
                against="vllm-router, P/D, one core" if name == "requests" else "its CPU / ours",
                at_least=REQUESTS_AIM,
            )
        )
    return figures


async def _paced(targets: Sequence[Target]) -> list[Figure]:
    """Measure streams at a pace, and what is added to asking the worker directly."""
    prompt = TextModel.load(resolve_model("")).encode(PROMPT)
    runs: dict[str, list[_Run]] = {target.name: [] for target in targets}
    added: dict[str, dict[str, list[float]]] = {target.name: {} for target in targets}
    for number in range(ROUNDS):
        for target in targets if number % 2 == 0 else reversed(targets):
            through = await _run(target, PACED)
            runs[target.name].append(through)
            direct = await _direct(target, prompt)
            for name, milliseconds in _differences(through.measured, direct).items():
                added[target.name].setdefault(name, []).append(milliseconds)
    figures = _each("router.cpu_paced", runs, "us/chunk", lambda run: run.us_per_chunk)
    for target in targets:
        for name, samples in added[target.name].items():
            has_aim = target.name == "dovetail" and name.endswith("p50")
            figures.append(
                figure(
                    f"router.{name}.{target.name}",
                    samples,
                    "ms",
                    against=f"its worker asked directly, {CLIENTS} streams",
                    at_most=ADDED_AIM_MS if has_aim else None,
                )
            )
    return figures


def _differences(through: Measured, direct: Measured) -> dict[str, float]:
    """Return what was added, in milliseconds."""
    pairs = {
        "added_ttft": (through.ttft, direct.ttft),
        "added_chunk": (through.lateness, direct.lateness),
    }
    return {
        f"{name}.p{percent}": 1e3 * (_percentile(ours, percent) - _percentile(without, percent))
        for name, (ours, without) in pairs.items()
        for percent in (50, 99)
    }


def _percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


async def _direct(target: Target, prompt: Sequence[int]) -> Measured:
    if target.name == "dovetail":
        return await run_direct(PACED, address=target.worker, prompt=prompt)
    port = int(target.worker.rsplit(":", 1)[1])
    return await run_load(PACED, port=port, model=target.model)


async def _in_turn(targets: Sequence[Target], load: Load) -> dict[str, list[_Run]]:
    """Run the load on each router in turn, A B, B A, ...; the first round warms up."""
    runs: dict[str, list[_Run]] = {target.name: [] for target in targets}
    for number in range(-1, ROUNDS):
        for target in targets if number % 2 == 0 else reversed(targets):
            result = await _run(target, load)
            if number >= 0:
                runs[target.name].append(result)
    return runs


async def _run(target: Target, load: Load) -> _Run:
    before = target.cpu_s()
    measured = await run_load(load, port=target.port, model=target.model)
    return _Run(measured, target.cpu_s() - before)


def _each(name: str, runs: Runs, unit: str, value: Callable[[_Run], float]) -> list[Figure]:
    return [
        figure(f"{name}.{router}", [value(one) for one in its], unit)
        for router, its in runs.items()
    ]
