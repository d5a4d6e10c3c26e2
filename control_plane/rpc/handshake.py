"""Whether two hellos may talk: the one place that knows what must agree. Pure."""

from __future__ import annotations

from core.kv_layout import summary_difference
from core.worker_record import Hello

WORKER = "worker"
"""The kind of whoever answers."""

DECODE = "decode"
"""A decode worker that opens a stream to a prefill worker; its blocks must have our layout."""

LAYOUT_FIELDS = (
    *("version", "model", "block_size", "num_kv_heads", "head_dim", "num_layers"),
    *("dtype", "tile_order", "block_bytes", "fingerprint"),
)
"""Of `KvLayout.summary`, each of which may be what differs."""

NO_HELLO = "no_hello"
"""The reason of who does not speak this protocol at all."""

REASONS = frozenset(
    {
        *("kind", "protocol", "cluster", "boot", "model", "model_fingerprint", "block_size"),
        *("layout", NO_HELLO),
        *(f"layout.{name}" for name in LAYOUT_FIELDS),
    }
)
"""Why a peer may be refused; its own words are none of them unless they begin with one."""


def difference(opener: Hello, worker: Hello) -> str | None:
    """Name the first thing in which an opener and a worker differ, with both values.

    A field that a side leaves empty is not compared; the layout only between workers.
    """
    if worker.kind != WORKER:
        return f"kind: expected {WORKER!r}, this is {worker.kind!r}"
    if opener.protocol != worker.protocol:
        return _differ("protocol", opener.protocol, worker.protocol)
    if opener.cluster != worker.cluster:
        return _differ("cluster", opener.cluster, worker.cluster)
    if opener.expected_boot and opener.expected_boot != worker.boot:
        return f"boot: expected {opener.expected_boot!r}, {worker.name} is now {worker.boot!r}"
    theirs, ours = opener.model_fingerprint, worker.model_fingerprint
    if theirs and ours and theirs != ours:
        return _differ("model_fingerprint", theirs, ours)
    if opener.kind == DECODE and opener.layout and worker.layout:
        return _layouts_differ(opener.layout, worker.layout)
    return None


def reason_of(difference: str) -> str:
    """Return the field that a difference names, for counters; "other" where it names none."""
    head = difference.partition(":")[0]
    return head if head in REASONS else "other"


def _layouts_differ(opener: str, worker: str) -> str | None:
    differing = summary_difference(opener, worker)
    return None if differing is None else _differ(*differing)


def _differ(name: str, opener: object, worker: object) -> str:
    return f"{name}: the opener has {opener!r}, the worker {worker!r}"
