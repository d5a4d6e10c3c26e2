"""Steps in a thread of their own: the same tokens, errors in their place, a pool that may move."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.ids import RequestId, SlotId
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from engine.engine import Engine, settings_for
from engine.events import Generated, Mode
from engine.executor.interface import Handle, StepPlan
from engine.executor.native_executor import NativeExecutor
from engine.executor.threaded_executor import ThreadedExecutor
from tests.step_driver import NATIVE, StepDriver, new_blocks, work
from tests.tiny_models import TOKENS, save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny(directory)
    return directory


def generate(tiny: Path, *, max_inflight: int, fences: bool = False) -> list[tuple[int, ...]]:
    """Run four requests through an engine; with `fences`, the pool moves every third step."""
    driver = StepDriver(tiny, 64, NATIVE)
    assert isinstance(driver.executor, NativeExecutor)
    executor = ThreadedExecutor(driver.executor)
    settings = settings_for(executor, NATIVE, max_model_len=256, max_receiving_share=0.5)
    engine = Engine(executor, settings, fingerprint=b"tiny", max_inflight=max_inflight)
    for number in range(4):
        sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=30 + number)
        prompt = tuple(TOKENS[number : 20 + 7 * number])
        engine.add(EngineRequest(RequestId(f"{number}"), prompt, sampling), Mode.LOCAL)
    tokens: dict[str, tuple[int, ...]] = {}
    steps = 0
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Generated):
                tokens[event.request_id] = tokens.get(event.request_id, ()) + event.token_ids
        steps += 1
        if fences and steps % 3 == 0:
            engine.settle()
            driver.region.fence()
    engine.close()
    driver.region.close()
    return [tokens[str(number)] for number in range(4)]


def test_tokens_are_the_same_with_steps_in_flight_and_a_pool_that_moves(tiny: Path) -> None:
    expected = generate(tiny, max_inflight=1)
    assert [len(tokens) for tokens in expected] == [30, 31, 32, 33]
    assert generate(tiny, max_inflight=2) == expected
    assert generate(tiny, max_inflight=3, fences=True) == expected


def test_what_a_step_raises_comes_out_of_its_collect(tiny: Path) -> None:
    driver = StepDriver(tiny, 16, NATIVE)
    assert isinstance(driver.executor, NativeExecutor)
    executor = ThreadedExecutor(driver.executor)
    assert (executor.layout, executor.num_blocks) == (driver.layout, 16)
    assert executor.numerics == driver.executor.numerics
    with pytest.raises(ValueError, match=r"sample\(0\): nothing was submitted"):
        executor.sample(Handle(0))
    added = driver.added(0, TOKENS[:3], adapter_id=3)
    executor.sample(executor.submit(StepPlan(0, added=(added,), work=(work(0, 3, 1),))))
    with pytest.raises(ValueError, match=r"collect\(1\): step 0 is the oldest"):
        executor.collect(Handle(1))
    with pytest.raises(ValueError, match="adapter 3"):
        executor.collect(Handle(0))
    executor.sample(executor.submit(StepPlan(5, work=(work(0, 1, 1),))))
    with pytest.raises(ValueError, match="plan 5: 1 is the next, without gaps"):
        executor.collect(Handle(5))
    executor.close()
    driver.region.close()


def test_only_what_depends_on_no_running_step_is_laid_out_early(tiny: Path) -> None:
    driver = StepDriver(tiny, 32, NATIVE)
    executor = driver.executor
    assert isinstance(executor, NativeExecutor)
    first = StepPlan(0, added=(driver.added(0, TOKENS[:5]),), work=(work(0, 5, 1),))
    assert executor.prepare(first) is None, "a slot comes"
    assert executor.prepare(StepPlan(1, work=(work(0, 1, 1),))) is None, "plan 0 is not applied"
    executor.sample(executor.submit(first))
    token = executor.collect(Handle(0)).results[0].token_ids[0]
    assert executor.prepare(StepPlan(1, work=(work(0, 2, 1, (7,)),))) is None, "drafts"
    assert executor.prepare(StepPlan(1, removed=(SlotId(0),), work=(work(0, 1, 1),))) is None
    calm = StepPlan(1, new_blocks=(new_blocks(0, *driver.take(1)),), work=(work(0, 1, 1),))
    prepared = executor.prepare(calm)
    assert prepared is not None
    executor.sample(executor.submit_prepared(calm, prepared))
    found = executor.collect(Handle(1)).results[0].token_ids
    driver.close()
    other = StepDriver(tiny, 32, NATIVE)
    assert other.generate(TOKENS[:5], 2) == [token, *found]
    other.close()
