"""TTFT of a prefill and a decode worker over that of one worker that does both.

The prefill worker and the colocated one have the same threads. Both clusters are up and idle, and
asked in turn with the same fresh prompt, over HTTP with streaming.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from bench.cluster import cluster
from bench.figures import Figure, figure
from bench.interleave import interleave, ratios
from bench.timed_client import TimedClient

AIM_BY_TOKENS = {64: None, 512: 1.10, 2000: 1.10}
ROUNDS = 12
THREADS = 1

_SHARED = ["--set", f"engine.threads={THREADS}"]


def run() -> Iterator[Figure]:
    """Yield the figures: ratios with the aims, and both sides in milliseconds."""
    with contextlib.ExitStack() as stack:
        pair_port = stack.enter_context(cluster(["--prefill", "1", "--decode", "1", *_SHARED]))
        alone_port = stack.enter_context(cluster(["--colocated", "1", *_SHARED]))
        pair = stack.enter_context(contextlib.closing(TimedClient(pair_port)))
        alone = stack.enter_context(contextlib.closing(TimedClient(alone_port)))
        for num_tokens, aim in AIM_BY_TOKENS.items():
            samples = interleave(
                {
                    "disaggregated": _contender(pair, num_tokens, is_pair=True),
                    "colocated": _contender(alone, num_tokens, is_pair=False),
                },
                ROUNDS,
                warm_up=2,
            )
            yield figure(
                f"ttft.{num_tokens}",
                ratios(samples, "disaggregated", "colocated"),
                "ratio",
                against="colocated, same threads",
                at_most=aim,
            )
            for name, seconds in samples.items():
                yield figure(f"ttft.{num_tokens}.{name}", [1e3 * s for s in seconds], "ms")


def _contender(client: TimedClient, num_tokens: int, *, is_pair: bool) -> Callable[[int], float]:
    headers = {"x-dovetail-disaggregate": "always"} if is_pair else {}

    def measure(number: int) -> float:
        prompt = client.fresh_prompt(num_tokens, seed=1000 * num_tokens + number)
        seconds, path = client.ttft(prompt, headers)
        if is_pair != bool(path.get("prefill_worker")):
            msg = f"{num_tokens} tokens went an unexpected way: {path}"
            raise RuntimeError(msg)
        return seconds

    return measure
