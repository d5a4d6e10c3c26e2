"""The native executor on the real model: bitwise however computed, near the reference however kept.

Wide matrices reach tiles and splits that tiny models do not.
"""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from core.config import EngineConfig
from tests.batch_invariance import ways
from tests.figures import Figures
from tests.oracle import smollm2
from tests.step_driver import NATIVE, StepDriver

TOKENS = [(7919 * index * index + 31 * index) % 49_000 + 20 for index in range(56)]
TEXT = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407),
    *(19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1),
]
KINDS = {
    "exact": NATIVE,
    "default": EngineConfig(executor="native"),
    "int8": EngineConfig(executor="native", weights="int8", kv_dtype="int8"),
}
LARGEST_KL = {"exact": 1e-6, "default": 0.008, "int8": 0.01}


@pytest.fixture(scope="module")
def reference() -> Tensor:
    return smollm2().reference_logits(TEXT).log_softmax(dim=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_and_distance(kind: str, reference: Tensor, figures: Figures) -> None:
    path = smollm2().path
    driver = StepDriver(path, 160, replace(KINDS[kind], threads=1))
    alone = driver.chunked_logits(TOKENS, 512)[28:]
    ours = driver.chunked_logits(TEXT, 512).log_softmax(dim=-1)
    driver.close()
    driver = StepDriver(path, 160, replace(KINDS[kind], threads=2))
    found = [*ways(driver, TOKENS, (16, 37))]
    driver.close()
    assert all(torch.equal(one, alone) for one in found)
    kl = float((reference.exp() * (reference - ours)).sum(dim=-1).mean())
    figures(f"native executor, {kind}: mean KL from transformers in f32 {kl:.1e} nats")
    assert abs(kl) < LARGEST_KL[kind]
