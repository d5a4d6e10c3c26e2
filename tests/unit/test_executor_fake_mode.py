"""The forward pass under torch's FakeTensorMode: shapes without values.

A captured CUDA graph replays one list of kernels on fixed addresses, so nothing that is launched
may depend on a value: no `.item()`, no shape from data, no branch on a tensor. Fake tensors have no
values, and fail at each of these. Run here: every op of every family, in each padded shape of a
decode batch, and chunks; what a device would run besides (copies, sampling) is checked on the meta
device by `test_executor_fake_device`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from core.config import EngineConfig
from engine.executor import torch_executor
from engine.executor.compiled_program import Inputs, Outputs
from engine.executor.interface import SlotWork
from engine.executor.step_inputs import build_inputs
from engine.executor.step_rows import arrange, padded_blocks, padded_rows
from engine.kernels import paged_kv, reference
from engine.kernels.linear_weight import PlainLinear
from engine.models.llama import compile_program
from engine.models.program import Op
from engine.models.tensor_shapes import expected_shapes
from tests.step_driver import StepDriver, work
from tests.tiny_models import VOCAB_SIZE, tiny_spec

MAX_SLOTS = 8
MAX_BLOCKS = 16
EVERY_PART = tiny_spec(
    qk_norm=True,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    nope_layers=(1,),
    sliding_window=20,
    sliding_layers=(1,),
    tied_embeddings=False,
    max_positions=16 * MAX_BLOCKS,
)


class FakeDriver(StepDriver):
    """An executor that runs as on a device, its pool and weights without values."""

    def __init__(self) -> None:
        config = EngineConfig(executor="torch", weights="bf16", threads=1, max_slots=MAX_SLOTS)
        super().__init__(Path("no file"), MAX_BLOCKS, config)
        self.torch_executor._tables = self.torch_executor._tables._replace(padded=True)

    def poison(self, block_ids: object) -> None:
        """There is no memory."""

    def forward(self, *items: SlotWork, context: int) -> Outputs | None:
        """Run the program on a step whose longest slot, the first, is so long already."""
        executor, slots = self.torch_executor, self.torch_executor._slots
        lengths = {item.slot: context if not item.slot else 0 for item in items}
        rows = arrange(items, lengths, executor.layout.block_size, padded=True)
        inputs = build_inputs(
            rows, items, slots, executor._pool, executor._buffer, executor._tables
        )
        selected = torch.arange(len(rows.slots))
        return executor._program.run(
            Inputs(inputs.token_ids, inputs.batch, executor._pool, selected, None)
        )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    def fake_weights(*_: object) -> dict[str, Tensor]:
        return {name: torch.empty(shape) for name, shape in expected_shapes(EVERY_PART).items()}

    def fake_elements(_: object, num_bytes: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_bytes // dtype.itemsize, dtype=dtype)

    monkeypatch.setattr("tests.step_driver.read_spec", lambda _: EVERY_PART)

    def fake_frequencies(head_dim: int, *_: object) -> Tensor:
        return torch.empty(head_dim // 2)

    monkeypatch.setattr(torch_executor, "open_tensors", fake_weights)
    monkeypatch.setattr(torch_executor, "torch_frequencies", fake_frequencies)
    monkeypatch.setattr(paged_kv, "elements_of", fake_elements)
    monkeypatch.setattr(reference, "pack_linear", PlainLinear)  # as on a device
    with FakeTensorMode():
        driver = FakeDriver()
        yield driver
        driver.close()


def test_the_model_has_every_op() -> None:
    """A new op of the union belongs into `EVERY_PART`."""
    ops = compile_program(EVERY_PART).ops
    assert {type(op) for op in ops} == set(get_args(Op))


def test_decodes_in_every_padded_shape(driver: FakeDriver) -> None:
    for num_rows in {padded_rows(count) for count in range(1, MAX_SLOTS + 1)}:
        items = [work(slot, 1) for slot in range(num_rows)]
        for num_blocks in {padded_blocks(count) for count in range(1, MAX_BLOCKS + 1)}:
            outputs = driver.forward(*items, context=16 * num_blocks - 1)
            assert outputs is not None
            assert isinstance(outputs.logits, FakeTensor)
            assert outputs.logits.shape == (num_rows, VOCAB_SIZE)


def test_chunks_beside_decodes(driver: FakeDriver) -> None:
    items = (work(1, 70), work(2, 1), work(3, 33), work(0, 1))
    outputs = driver.forward(*items, context=200)
    assert outputs is not None
    assert outputs.logits.shape == (2 + 70 + 33, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (lambda x: x.sum().item(), DataDependentOutputException),
        (lambda x: x[x > 0], DynamicOutputShapeException),
        (lambda x: x if x.any() else -x, DataDependentOutputException),
        (lambda x: x.tolist(), DataDependentOutputException),
    ],
    ids=["item", "mask", "branch", "list"],
)
@pytest.mark.parametrize("kernel", ["qk_norm", "rope_kv_write", "attention", "gated_silu"])
def test_a_kernel_that_reads_a_value_fails(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    broken: Callable[[Tensor], object],
    error: type[Exception],
) -> None:
    right = getattr(driver.torch_executor._kernels, kernel)

    def wrong(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        broken(first)
        return right(first, *args, **kwargs)

    monkeypatch.setattr(driver.torch_executor._kernels, kernel, wrong)
    with pytest.raises(error):
        driver.forward(work(0, 1), context=40)
