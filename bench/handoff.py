"""What a handoff costs: the fabric's speed by itself, and the time it adds to a real prompt.

The exposed time is what the decode worker still waits for KV after the first token has arrived; the
rest of the transfer is hidden behind the prefill's computing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bench import handoff_fabric
from bench.cluster import cluster
from bench.figures import Figure, figure
from bench.timed_client import TimedClient

NUM_TOKENS = 2000
ROUNDS = 8
AIM = 0.05

_HEADERS = {"x-dovetail-disaggregate": "always"}


def run() -> Iterator[Figure]:
    """Yield the fabric's figures, then those of prompts through a cluster."""
    yield from handoff_fabric.run()
    arguments = ["--prefill", "1", "--decode", "1", "--set", "engine.threads=1"]
    with cluster(arguments) as port, contextlib.closing(TimedClient(port)) as client:
        yield from _exposed(client)


def _exposed(client: TimedClient) -> Iterator[Figure]:
    """Read the workers' own durations from the paths of fresh prompts; the first one connects."""
    paths = [
        client.ttft(client.fresh_prompt(NUM_TOKENS, seed=7000 + number), _HEADERS, max_tokens=2)[1]
        for number in range(ROUNDS + 1)
    ][1:]
    yield figure(
        f"handoff.exposed.{NUM_TOKENS}",
        [path["exposed_transfer_s"] / path["prefill_s"] for path in paths],
        "of the prefill",
        against=f"prefill of {NUM_TOKENS} tokens",
        at_most=AIM,
    )
    yield figure(
        f"handoff.exposed_time.{NUM_TOKENS}",
        [1e3 * path["exposed_transfer_s"] for path in paths],
        "ms",
    )
    yield figure(
        f"handoff.bytes.{NUM_TOKENS}",
        [path["bytes_transferred"] / 1e6 for path in paths],
        "MB",
        against=f"{paths[0]['blocks_transferred']} blocks",
    )
