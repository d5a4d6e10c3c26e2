"""The native executor on tiny models: every kind of weights and cache, bitwise however computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from msgspec.structs import replace
from torch import Tensor

from core.errors import ModelError
from core.ids import SlotId
from core.sampling_params import SamplingParams
from engine.executor import native_model
from engine.executor.interface import Handle, SlotResult
from engine.executor.native_executor import NativeExecutor
from engine.executor.native_model import load_model
from engine.executor.native_program import lower
from engine.executor.native_weights import choose_kind
from engine.kernels.cpu.library import kernel_tables
from engine.models.llama import compile_program
from engine.models.program import Activation, Add, Op, Program
from engine.models.read_spec import read_spec
from tests.batch_invariance import ways
from tests.step_driver import NATIVE, StepDriver, work
from tests.tiny_gguf import write_gguf
from tests.tiny_models import TOKENS, reference, save_tiny, tiny_spec

TABLES = {table.name.decode(): table for table in kernel_tables()}
SHAPE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6}
ERRORS = {"f32": 2e-5, "bf16": 0.05, "int8": 0.2, "Q8_0": 0.2, "Q4_0": 0.2, "Q4_1": 0.2}
"""Mean difference of logits, of up to 7, from transformers' on the weights that the file means. A
random model this narrow is not kind to activations of 8 bits."""
CACHE_ERRORS = {"f32": 0.0, "bf16": 0.02, "int8": 0.1}


class Tiny:
    """A tiny model in the form that a kind of weights needs."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.model: Any = save_tiny(directory, **SHAPE)
        self.path = directory
        self.choice = kind
        if kind.startswith("Q"):
            self.choice = "native"
            self.path = directory / "tiny.gguf"
            write_gguf(self.path, self.model, kind=GGMLQuantizationType[kind])

    def driver(self, num_blocks: int = 200, **fields: Any) -> StepDriver:
        table = fields.pop("table", None)
        config = replace(NATIVE, weights=self.choice, **fields)
        return StepDriver(self.path, num_blocks, config, table)


def test_inputs_of_logits_and_of_queries_keys_and_values_are_rounded_with_more_care(
    tmp_path: Path,
) -> None:
    tiny = Tiny(tmp_path, "Q4_1")
    model = load_model(read_spec(tiny.path), tiny.path, "native")
    careful = {
        name
        for source in model.program.matrices
        for name, _ in source.parts
        if model.places.matrix(source, model.memory).sums is not None
    }
    wanted = {"q_proj", "k_proj", "v_proj", "lm_head", "embed_tokens"}
    assert careful
    assert {name.split(".")[-2] for name in careful} <= wanted
    assert {"q_proj", "k_proj", "v_proj"} <= {name.split(".")[-2] for name in careful}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("kv_dtype", CACHE_ERRORS)
def test_logits_never_depend_on_what_else_is_computed(
    tmp_path: Path, kind: str, kv_dtype: str
) -> None:
    tiny = Tiny(tmp_path, kind)
    found: list[Tensor] = []
    for threads in (1, 2):
        driver = tiny.driver(kv_dtype=kv_dtype, threads=threads)
        found += ways(driver, TOKENS, (512, 16, 37, 64))
        driver.close()
    assert all(torch.equal(one, found[0]) for one in found)
    differs = (found[0] - reference(tiny.model, TOKENS)[len(TOKENS) // 2 :]).abs()
    assert float(differs.mean()) < ERRORS[kind] + CACHE_ERRORS[kv_dtype]


def test_the_ways_are_ways_to_differ(tmp_path: Path) -> None:
    """torch's sums depend on the shapes of a step; if its logits were equal, nothing was tried."""
    driver = Tiny(tmp_path, "f32").driver(executor="torch")
    found = [*ways(driver, TOKENS, (512, 37))]
    driver.close()
    assert not all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("kind", ["f32", "int8", "Q4_1"])
@pytest.mark.parametrize("table", TABLES)
def test_every_instruction_set(tmp_path: Path, table: str, kind: str) -> None:
    tiny = Tiny(tmp_path, kind)
    driver = tiny.driver(table=TABLES[table])
    found = [*ways(driver, TOKENS[:70], (512, 37))]
    driver.close()
    assert all(torch.equal(one, found[0]) for one in found)
    differs = (found[0] - reference(tiny.model, TOKENS[:70])[35:]).abs()
    assert float(differs.mean()) < ERRORS[kind]
    assert f"/{table}/" in driver.executor.numerics


@pytest.mark.parametrize("threads", [1, 2])
def test_sampled_tokens_are_those_of_torch(tmp_path: Path, threads: int) -> None:
    """Same logits but for their last bits, same noise: same tokens, seed by seed."""
    tiny = Tiny(tmp_path, "f32")
    samplings = [
        SamplingParams(temperature=1.0, seed=seed, top_k=20 * (seed % 3), top_p=0.95)
        for seed in range(6)
    ]
    drivers = (tiny.driver(threads=threads), tiny.driver(executor="torch"))
    ours, theirs = (
        [driver.generate(TOKENS[:20], 12, sampling) for sampling in samplings] for driver in drivers
    )
    for driver in drivers:
        driver.close()
    assert ours == theirs
    assert len({tuple(tokens) for tokens in ours}) > 3


def test_draws_of_every_kind_in_one_step_are_those_of_torch(tmp_path: Path) -> None:
    """A chunk, a second sample, right and wrong drafts, three samples of one row under a mask, a
    banned word, log-probabilities: each draw is told what is its own."""
    tiny = Tiny(tmp_path, "f32")
    warm = SamplingParams(temperature=1.0, seed=5)
    told = replace(warm, seed=6, logprobs=3, bad_words=((1,),), min_tokens=9, stop_token_ids=(2,))
    even = torch.arange(tiny.model.config.vocab_size) % 2 == 0
    found: list[list[tuple[SlotResult, ...]]] = []
    for driver in (tiny.driver(), tiny.driver(executor="torch")):
        right = driver.generate(TOKENS[:12], 3, warm)
        added = [
            driver.added(0, TOKENS[:40], warm),
            driver.added(1, TOKENS[:9], replace(warm, n=2), sample_index=1),
            driver.added(2, TOKENS[:12], warm),
            driver.added(3, TOKENS[:12], warm),
            driver.added(4, TOKENS[:8], replace(warm, n=3)),
            driver.added(5, TOKENS[:7], told),
        ]
        starts = (work(1, 8), work(2, 12, 1), work(3, 12, 1), work(5, 7, 1))
        steps = [driver.step(work(0, 16), *starts, added=tuple(added))]
        drafts = (work(2, 4, 1, (*right[1:], 7)), work(3, 4, 1, (right[1], 7, 7)))
        some = (work(0, 8), work(1, 1, 1), *drafts, work(4, 8, 3), work(5, 1, 1))
        masks = {SlotId(4): even.numpy(), SlotId(1): ~even.numpy()}
        steps.append(driver.step(*some, masks=masks))
        assert [len(one.token_ids) for one in steps[-1]] == [0, 1, 3, 2, 3, 1]
        last = (work(0, 16, 1), *(work(slot, 1, 1) for slot in (1, 2, 3, 5)))
        steps.append(driver.step(*last, masks={SlotId(1): even.numpy()}))
        steps.append(driver.step(*last[1:]))
        driver.close()
        found.append(steps)
    for ours, theirs in zip(*found, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_ids == other.token_ids
            assert len(one.logprobs) == len(other.logprobs)
            for mine, its in zip(one.logprobs, other.logprobs, strict=True):
                assert mine.top_ids == its.top_ids
                assert mine.top == pytest.approx(its.top, abs=1e-4)
    samples = found[0][1][4].token_ids
    assert len(set(samples)) > 1
    assert all(token % 2 == 0 for token in samples)


def test_auto_keeps_blocks_that_the_kernels_know(tmp_path: Path) -> None:
    assert choose_kind("auto", {"a": "Q6_K", "b": "F32"}) == "bf16"
    assert choose_kind("auto", {"a": "Q6_K", "b": "Q4_1"}) == "native"
    assert choose_kind("auto", {"a": "BF16"}) == "bf16"
    assert choose_kind("int8", {"a": "Q4_1"}) == "int8"


def test_blocks_of_types_that_are_not_known_become_int8(tmp_path: Path) -> None:
    """A K type, whose rows are superblocks of 256."""
    model = save_tiny(tmp_path, hidden_size=256, intermediate_size=256, num_attention_heads=4)
    path = write_gguf(tmp_path / "k.gguf", model, kind=GGMLQuantizationType.Q5_K)
    config = replace(NATIVE, weights="native")
    driver = StepDriver(path, 32, config)
    logits = driver.chunked_logits(TOKENS, 64)
    driver.close()
    differs = (logits - reference(model, TOKENS)).abs()
    assert 1e-5 < float(differs.max()) < 1.0
    assert driver.executor.numerics.endswith("/weights-native/kv-f32/tp-1")


def test_a_file_s_floats_are_kept_as_they_are(tmp_path: Path) -> None:
    for dtype, error in ((torch.float32, 1e-4), (torch.float16, 1e-4), (torch.bfloat16, 1e-4)):
        directory = tmp_path / str(dtype)
        model = save_tiny(directory, dtype=dtype, **SHAPE)
        driver = StepDriver(directory, 32, replace(NATIVE, weights="native"))
        torch.testing.assert_close(
            driver.chunked_logits(TOKENS, 64), reference(model, TOKENS), atol=error, rtol=0.0
        )
        driver.close()


def test_a_region_that_is_too_small_is_refused(tmp_path: Path) -> None:
    driver = Tiny(tmp_path, "f32").driver(num_blocks=4)
    model = load_model(driver.spec, tmp_path)
    with pytest.raises(ValueError, match=r"5 blocks of .* do not fit into a region of"):
        NativeExecutor(driver.spec, model, NATIVE, driver.layout, driver.region, 5)
    driver.close()


@pytest.mark.parametrize("op", [Add("a", "b"), Activation("a", "silu", "b")])
def test_what_must_follow_a_product_is_refused_elsewhere(op: Op) -> None:
    with pytest.raises(ModelError, match=f"cannot run {type(op).__name__}: it must follow the pro"):
        lower(tiny_spec(), Program((op,), "hidden", "logits"))


def test_steps_out_of_order_are_refused(tmp_path: Path) -> None:
    driver = Tiny(tmp_path, "f32").driver()
    executor, added = driver.executor, driver.added(0, TOKENS[:5])
    with pytest.raises(ValueError, match=r"sample\(0\): none is the one to sample, once"):
        executor.sample(Handle(0))
    handle = executor.submit(driver.plan(work(0, 5, 1), added=(added,)))
    with pytest.raises(ValueError, match=r"plan 1: step 0 was not sampled yet"):
        executor.submit(driver.plan(work(0, 1, 1)))
    executor.sample(handle)
    with pytest.raises(ValueError, match=r"sample\(0\): step 0 is the one to sample, once"):
        executor.sample(handle)
    with pytest.raises(ValueError, match=r"collect\(7\): step 0 is the oldest"):
        executor.collect(Handle(7))
    driver.close()


def test_a_layout_that_is_torch_s_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    driver = StepDriver(tmp_path, 4)
    model = load_model(read_spec(tmp_path), tmp_path)
    with pytest.raises(ValueError, match="tile order 'token_major': the native kernels read 'pai"):
        NativeExecutor(driver.spec, model, NATIVE, driver.layout, driver.region, 4)
    driver.close()


def test_what_the_library_refuses_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def headless(program: Program) -> Program:
        return replace(program, ops=program.ops[:-1])

    save_tiny(tmp_path)
    monkeypatch.setattr(
        native_model, "compile_program", lambda spec: headless(compile_program(spec))
    )
    with pytest.raises(ModelError, match="cannot run Norm: the program must end with SelectRows"):
        load_model(read_spec(tmp_path), tmp_path)
