"""The fabric's series carry vLLM's names and labels, and count what happened."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kv_transfer.metrics import FabricMetrics
from kv_transfer.transfer_thread import TransferOutcome
from kv_transfer.transport import Health, TransferState

LABELS = {"model_name": "smol", "engine": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> FabricMetrics:
    return FabricMetrics(registry, model_name="smol", engine="0", backend="nixl")


def outcome(state: TransferState) -> TransferOutcome:
    return TransferOutcome(state, "", 0.002, 0.003, 368_640, 4)


def test_a_done_write_is_in_every_histogram(
    registry: CollectorRegistry, metrics: FabricMetrics
) -> None:
    metrics.observe(outcome(TransferState.DONE))
    sums = {
        name: registry.get_sample_value(f"vllm:{name}_sum", LABELS)
        for name in (
            "nixl_xfer_time_seconds",
            "nixl_post_time_seconds",
            "nixl_bytes_transferred",
            "nixl_num_descriptors",
        )
    }
    assert sums == {
        "nixl_xfer_time_seconds": 0.003,
        "nixl_post_time_seconds": 0.002,
        "nixl_bytes_transferred": 368_640,
        "nixl_num_descriptors": 4,
    }
    assert registry.get_sample_value("vllm:nixl_num_failed_transfers_total", LABELS) == 0


def test_a_failed_write_is_only_counted_as_such(
    registry: CollectorRegistry, metrics: FabricMetrics
) -> None:
    metrics.observe(outcome(TransferState.FAILED))
    metrics.observe(outcome(TransferState.REFUSED))
    assert registry.get_sample_value("vllm:nixl_num_failed_transfers_total", LABELS) == 2
    assert registry.get_sample_value("vllm:nixl_xfer_time_seconds_count", LABELS) == 0


def test_only_the_transport_seen_last_is_in_use(
    registry: CollectorRegistry, metrics: FabricMetrics
) -> None:
    metrics.show(Health(ok=True, transport="ucx"))
    metrics.show(Health(ok=True, transport="ucx (cma)"))
    name = "dovetail:transport_in_use"
    assert registry.get_sample_value(name, {"transport": "nixl/ucx (cma)"}) == 1
    assert registry.get_sample_value(name, {"transport": "nixl/ucx"}) is None
