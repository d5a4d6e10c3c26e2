"""Steps as a GPU must run them, checked without one: on torch's meta device, which has no data.

Whatever needs a value (`.item()`, a shape from data) fails there by itself. `DeviceRules` refuses
what a GPU would take and be slow or wait for: operands on two devices, and copies that block.
(Fake CUDA tensors cannot be indexed on a build of torch without CUDA; meta tensors can.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.config import EngineConfig
from core.ids import SlotId
from core.sampling_params import SamplingParams
from engine.executor import pending_step
from engine.executor.interface import BlockCopy, SlotResult
from engine.executor.step_rows import padded_blocks, padded_rows
from engine.kernels import paged_kv
from engine.sampling.gumbel import gumbel_argmax
from tests.step_driver import GREEDY, StepDriver, work
from tests.tiny_models import save_tiny

META = torch.device("meta")
COPIES = ("aten.to.", "aten._to_copy.", "aten.copy_.")
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    logit_bias=((3, 1.0),),
    min_tokens=4,
    stop_token_ids=(5,),
    bad_words=((7, 8), (9,)),
    logprobs=2,
    seed=1,
)


class DeviceRules(TorchDispatchMode):
    """Checks every operation that is dispatched, and keeps the shapes of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, tuple[torch.Size, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        out = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in (*tensors, *results)}
        if len(devices) > 1:
            name = str(func)
            assert name.startswith(COPIES), f"{name} on {sorted(devices)}"
            non_blocking = any(flag is True for flag in (*args, kwargs.get("non_blocking")))
            assert non_blocking, f"{name} waits for the device"
        if META.type in devices:
            self.shapes.append((str(func), tuple(tensor.shape for tensor in tensors)))
        return out


class CallRules(TorchFunctionMode):
    """Checks what Python asks for: some calls make a CPU tensor and wait for its copy inside."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor):
            device = kwargs.get("device")
            assert device in (None, torch.device("cpu")), f"{func.__name__} waits for {device}"
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device == META:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(index, list) for index in indices), "a list as an index"
        return func(*args, **kwargs)


class NothingToRead:
    """Stands in for `ReadBack`: where a device's part ends."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        assert device == META
        assert all(tensor.device == META for tensor in tensors)
        self.tensors = tensors


class DeviceDriver(StepDriver):
    """Steps of an executor whose pool is on the meta device, under the rules."""

    def __init__(self, path: Path) -> None:
        config = EngineConfig(device="meta", weights="bf16", threads=1, max_inflight=2)
        super().__init__(path, 64, config)

    def launch(self, *work_items: Any, **delta: Any) -> DeviceRules:
        """Submit and sample one step; a device would not have begun yet."""
        rules = DeviceRules()
        plan = self.plan(*work_items, **delta)
        with rules, CallRules():
            self.executor.sample(self.executor.submit(plan))
        self.torch_executor._steps.clear()
        return rules

    def step(self, *work_items: Any, **delta: Any) -> tuple[SlotResult, ...]:
        """Launch; nothing comes back."""
        self.launch(*work_items, **delta)
        return ()

    def poison(self, block_ids: Sequence[int]) -> None:
        """There is no memory."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with most parts: biases, normalized heads, a layer with a window and one without."""
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny(
        directory,
        model_type="qwen3",
        head_dim=16,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=30,
        max_window_layers=1,
    )
    return directory


@pytest.fixture
def driver(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceDriver]:
    def device_elements(_: object, num_bytes: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=META)

    monkeypatch.setattr(paged_kv, "elements_of", device_elements)
    monkeypatch.setattr(pending_step, "ReadBack", NothingToRead)
    driver = DeviceDriver(tiny)
    yield driver
    driver.close()


def prefill(driver: DeviceDriver, count: int, sampling: SamplingParams = GREEDY) -> None:
    added = tuple(driver.added(slot, range(1, 20), sampling) for slot in range(count))
    driver.step(*[work(slot, 19, 1) for slot in range(count)], added=added)


def test_a_chunk(driver: DeviceDriver) -> None:
    added = driver.added(0, range(1, 70))
    rules = driver.launch(work(0, 48), added=(added,))
    assert any("bmm" in name for name, _ in rules.shapes)
    driver.launch(work(0, 21, 1))


def test_a_scored_chunk(driver: DeviceDriver) -> None:
    added = driver.added(0, range(1, 70), prompt_logprobs=3)
    rules = driver.launch(work(0, 69, 1), added=(added,))
    assert sum("logsumexp" in name for name, _ in rules.shapes) == 2


def test_decodes_of_every_sampling_rule(driver: DeviceDriver) -> None:
    prefill(driver, 3, EVERYTHING)
    driver.launch(*[work(slot, 1, 1) for slot in range(3)])
    driver.launch(removed=(SlotId(1),))


def test_drafts_copies_and_zeroes_beside_a_chunk(driver: DeviceDriver) -> None:
    prefill(driver, 2)
    added = driver.added(2, range(1, 30), EVERYTHING)
    blocks = driver.take(2)
    driver.launch(
        work(0, 3, 1, (4, 5)),
        work(1, 1, 1),
        work(2, 29, 2),
        added=(added,),
        zeroes=(blocks[0],),
        copies=(BlockCopy(blocks[0], blocks[1]),),
    )


def test_decode_steps_come_in_few_shapes(driver: DeviceDriver) -> None:
    """Five to eight sequences compute in one shape; what is drawn from their logits may vary."""
    prefill(driver, 9)
    forwards = [forward_shapes(driver, count) for count in (5, 6, 8, 9)]
    assert forwards[0] == forwards[1] == forwards[2]
    assert forwards[3] != forwards[0]


def forward_shapes(driver: DeviceDriver, count: int) -> list[Any]:
    """Return the shapes of the program's operations in a step of `count` decodes."""
    rules = DeviceRules()
    run = driver.torch_executor._program.run

    def recorded(inputs: Any) -> Any:
        with rules:
            return run(inputs)

    driver.torch_executor._program.run = recorded
    driver.launch(*[work(slot, 1, 1) for slot in range(count)])
    driver.torch_executor._program.run = run
    return rules.shapes


@pytest.mark.parametrize(
    ("broken", "error", "said"),
    [
        (lambda scores: scores[0, 0].item(), RuntimeError, "meta"),
        (lambda scores: scores[scores > 0], NotImplementedError, "nonzero"),
        (lambda scores: scores[torch.tensor([0])], AssertionError, "on .'cpu', 'meta'."),
        (lambda scores: scores[[0]], AssertionError, "a list as an index"),
        (lambda scores: torch.tensor([1.0], device=scores.device), AssertionError, "waits for"),
        (lambda scores: torch.ones(1).to(scores.device), AssertionError, "waits for the device"),
    ],
    ids=["item", "mask", "cpu-index", "list-index", "tensor", "blocking-copy"],
)
def test_the_rules_refuse(
    driver: DeviceDriver,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[Tensor], object],
    error: type[Exception],
    said: str,
) -> None:
    """One wrong line in the middle of sampling."""

    def wrong(scores: Tensor, keys: Any) -> Tensor:
        broken(scores)
        return gumbel_argmax(scores, keys)

    monkeypatch.setattr("engine.sampling.sampler.gumbel_argmax", wrong)
    with pytest.raises(error, match=said):
        prefill(driver, 1, EVERYTHING)


def test_padding_changes_no_logit(tiny: Path) -> None:
    """What a device would compute, on the CPU: rows and context padded, a chunk beside them."""
    drivers = [StepDriver(tiny, 64), StepDriver(tiny, 64)]
    drivers[1].torch_executor._tables = drivers[1].torch_executor._tables._replace(padded=True)
    logits: list[list[Tensor]] = []
    for driver in drivers:
        tokens = [7 * index % 97 for index in range(200)]
        added = tuple(driver.added(slot, tokens[: 19 + 60 * slot]) for slot in range(4))
        first = [work(slot, 18 + 60 * slot) for slot in range(3)]
        steps = [driver.logits(*first, added=added[:3])]
        steps.append(
            driver.logits(work(3, 199), *(work(slot, 1) for slot in range(3)), added=added[3:])
        )
        results = driver.step(work(1, 3, 1, (4, 5)), work(0, 1, 1), work(2, 1, 1))
        assert [len(result.token_ids) for result in results] == [1, 1, 1]
        logits.append([*steps, driver.logits(*(work(slot, 1) for slot in range(3)))])
        driver.close()
    for exact, padded in zip(*logits, strict=True):
        torch.testing.assert_close(padded, exact, atol=1e-5, rtol=0.0)


def test_padded_sizes() -> None:
    assert [padded_rows(n) for n in (1, 2, 3, 5, 8, 33)] == [1, 2, 4, 8, 8, 64]
    assert [padded_blocks(n) for n in (1, 7, 8, 9, 17, 500)] == [1, 7, 8, 10, 20, 512]
    sizes = {padded_blocks(n) for n in range(1, 513)}
    assert len(sizes) == 32
    assert all(n <= padded_blocks(n) <= 1.25 * n for n in range(1, 2000))


def test_host_memory_is_refused_by_a_device(tiny: Path) -> None:
    with pytest.raises(ValueError, match="blocks in cpu memory: steps on meta need theirs"):
        DeviceDriver(tiny)
