"""The fabric's Prometheus series: vLLM's names and buckets, and the transport in use."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kv_transfer.transfer_thread import TransferOutcome
from kv_transfer.transport import Health, TransferState

# vLLM's (vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py).
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES = tuple(float(2 ** (10 + exponent)) for exponent in range(1, 25, 2))  # 2 KiB to 8 GiB
_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10_000, 20_000, 50_000)
_LABELS = ("model_name", "engine")


class FabricMetrics:
    """The writes and reads that one worker posts; give `observe` to its `TransferThread` as
    `on_outcome`."""

    def __init__(
        self, registry: CollectorRegistry, *, model_name: str, engine: str, backend: str
    ) -> None:
        self._backend = backend
        labels = (model_name, engine)
        self._xfer_time = Histogram(
            "vllm:nixl_xfer_time_seconds",
            "Seconds from posting a KV write or read to its completion.",
            _LABELS,
            registry=registry,
            buckets=_SECONDS[1:],
        ).labels(*labels)
        self._post_time = Histogram(
            "vllm:nixl_post_time_seconds",
            "Seconds that posting a KV write or read took.",
            _LABELS,
            registry=registry,
            buckets=_SECONDS,
        ).labels(*labels)
        self._num_bytes = Histogram(
            "vllm:nixl_bytes_transferred",
            "Bytes of one KV write or read.",
            _LABELS,
            registry=registry,
            buckets=_BYTES,
        ).labels(*labels)
        self._num_descriptors = Histogram(
            "vllm:nixl_num_descriptors",
            "Descriptors of one KV write or read, after merging neighbours.",
            _LABELS,
            registry=registry,
            buckets=_DESCRIPTORS,
        ).labels(*labels)
        self._failed = Counter(
            "vllm:nixl_num_failed_transfers",
            "KV writes and reads that failed.",
            _LABELS,
            registry=registry,
        ).labels(*labels)
        self._transport = Gauge(
            "dovetail:transport_in_use",
            "1 for the fabric's backend and what it was seen to use.",
            ("transport",),
            registry=registry,
        )

    def observe(self, outcome: TransferOutcome) -> None:
        """Count the end of a write or read."""
        if outcome.state is not TransferState.DONE:
            self._failed.inc()
            return
        self._xfer_time.observe(outcome.seconds)
        self._post_time.observe(outcome.posted_s)
        self._num_bytes.observe(outcome.num_bytes)
        self._num_descriptors.observe(outcome.num_descriptors)

    def show(self, health: Health) -> None:
        """Set the transport in use, such as "nixl/ucx (cma)"."""
        self._transport.clear()
        self._transport.labels(f"{self._backend}/{health.transport}").set(1)
