"""The sampler's rules against a plain numpy reference, and what each rule promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from core.sampling_params import SamplingParams
from engine.sampling.gumbel import NoiseKeys, noise_of_all
from engine.sampling.sampler import Sampled, SampleRow, Sequences, sample
from engine.sampling.slot_sampling import resolve
from engine.token_rules import completing_ids

VOCAB = 2300
PROMPT = [3, 5, 5, 8]
OUTPUT = [5, 11, 11, 11, 20]
Doubles = npt.NDArray[np.float64]

RULES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.3, "seed": 2**64 - 1, "top_k": 3},
    {"temperature": 1.0, "seed": 3, "top_p": 0.3},
    {"temperature": 1.0, "seed": 3, "top_p": 0.999},
    {"temperature": 1.0, "seed": 4, "min_p": 0.2},
    {"temperature": 0.9, "seed": 5, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.6},
    {"temperature": 0.0, "repetition_penalty": 0.5, "frequency_penalty": -0.4},
    {"temperature": 0.0, "logit_bias": ((77, 50.0), (11, -100.0))},
    {"temperature": 1.0, "seed": 9, "logit_bias": ((77, 4.0),), "repetition_penalty": 1.2},
    {"temperature": 0.0, "min_tokens": 6, "eos_token_ids": (1,), "stop_token_ids": (2,)},
]


def logits_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB, generator=generator) * 3
    logits[1], logits[2] = 30.0, 29.0  # EOS and a stop token lead
    logits[11], logits[5] = 14.0, 13.5
    return logits


def run(logits: torch.Tensor, params: list[SamplingParams], **fields: Any) -> Sampled:
    return run_in_place(logits.clone(), params, **fields)


def run_in_place(logits: torch.Tensor, params: list[SamplingParams], **fields: Any) -> Sampled:
    rows = len(params)
    tokens = torch.tensor([PROMPT + OUTPUT + [999] * 7])  # beyond its end: never to be seen
    sequences = Sequences(
        token_ids=tokens,
        slots=torch.zeros(rows, dtype=torch.int64),
        num_prompt=torch.full((rows,), len(PROMPT)),
        positions=torch.full((rows,), len(PROMPT) + len(OUTPUT)),
        longest=tokens.shape[1],
    )
    cpu = torch.device("cpu")
    wanted = [SampleRow(resolve(p, cpu), index % 2, **fields) for index, p in enumerate(params)]
    return sample(logits, wanted, sequences)


def reference(logits: torch.Tensor, p: SamplingParams, sample_index: int) -> int:
    x = logits.double().numpy().copy()
    if len(OUTPUT) < p.min_tokens:
        x[[*p.eos_token_ids, *p.stop_token_ids]] = -np.inf
    for token, bias in p.logit_bias:
        x[token] += bias
    for token in set(PROMPT + OUTPUT):
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
    for token in set(OUTPUT):
        x[token] -= p.frequency_penalty * OUTPUT.count(token) + p.presence_penalty
    if p.temperature == 0:
        return int(x.argmax())
    x = kept(x / p.temperature, p)
    words = (p.seed & 0xFFFFFFFF, p.seed >> 32, sample_index, len(PROMPT) + len(OUTPUT))
    noise = noise_of_all(NoiseKeys(*(torch.tensor([word]) for word in words)), VOCAB)[0]
    return int((x + noise.double().numpy()).argmax())


def kept(x: Doubles, p: SamplingParams) -> Doubles:
    x = np.where(x >= x.max() + np.log(p.min_p or 1e-300), x, -np.inf)
    if p.top_k:
        x = np.where(x >= np.sort(x)[-p.top_k], x, -np.inf)
    order = np.argsort(-x)
    probabilities = np.exp(x[order] - np.logaddexp.reduce(x))
    before = probabilities.cumsum() - probabilities
    dropped = order[before >= p.top_p]
    x[dropped] = -np.inf
    return x


@pytest.mark.parametrize("rules", RULES, ids=",".join)
def test_one_row_agrees_with_numpy(rules: dict[str, Any]) -> None:
    params = SamplingParams(**rules)
    for seed in range(4):
        logits = logits_of(seed)
        if params.min_tokens == 0:
            logits[[1, 2]] = 0.0
        token = int(run(logits[None], [params]).token_ids[0])
        assert token == reference(logits, params, 0)


def test_a_row_does_not_depend_on_its_company() -> None:
    params = [SamplingParams(**rules) for rules in RULES]
    logits = torch.stack([logits_of(seed) for seed in range(len(params))])
    together = run(logits, params).token_ids.tolist()
    for index, param in enumerate(params):
        pair = run(logits[[index, index]], [param, param]).token_ids.tolist()
        assert pair[index % 2] == together[index]


def test_min_tokens_masks_until_enough_were_generated() -> None:
    logits = logits_of(0)[None]
    rules: dict[str, Any] = {"temperature": 0.0, "eos_token_ids": (1,), "stop_token_ids": (2,)}
    early = SamplingParams(min_tokens=len(OUTPUT) + 1, **rules)
    enough = SamplingParams(min_tokens=len(OUTPUT), **rules)
    assert int(run(logits, [early]).token_ids[0]) not in (1, 2)
    assert int(run(logits, [enough]).token_ids[0]) == 1


def test_a_mask_beats_a_bias() -> None:
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[[40, 41]] = True
    params = SamplingParams(temperature=1.0, seed=8, logit_bias=((7, 100.0), (41, 60.0)))
    assert int(run(logits_of(1)[None], [params], allowed=allowed).token_ids[0]) == 41


def test_top_k_1_and_a_tiny_top_p_are_greedy() -> None:
    narrow: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}]
    for rules in narrow:
        params = SamplingParams(temperature=5.0, seed=6, **rules)
        assert int(run(logits_of(2)[None], [params]).token_ids[0]) == 1


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize("penalty", [5e-324, 1e-39, 1e-30, 1e30, 1e39, 1e308])
def test_a_penalty_beyond_float32_stays_in_its_row(penalty: float, temperature: float) -> None:
    """One client's number must not make a NaN that ends the step, and with it all requests."""
    extreme = SamplingParams(seed=1, temperature=temperature, repetition_penalty=penalty)
    plain = SamplingParams(seed=2, temperature=1.0)
    logits = logits_of(3)[None]
    logits[0, [1, 2]] = 0.0
    (alone,) = run(logits, [extreme]).token_ids.tolist()
    seen = set(PROMPT + OUTPUT)
    # Positive logits of seen tokens grow without bound, or vanish: either settles who wins.
    assert (alone in seen) == (penalty < 1)
    together = run(torch.cat([logits, logits]), [extreme, plain]).token_ids.tolist()
    assert together[0] == alone


def test_rows_of_nan_alone_end_no_step() -> None:
    params = [SamplingParams(seed=1, temperature=1.0), SamplingParams(temperature=0.0)]
    tokens = run(torch.full((2, VOCAB), torch.nan), params).token_ids.tolist()
    assert all(0 <= token < VOCAB for token in tokens)


def test_a_nucleus_wider_than_the_quick_look() -> None:
    """Flat logits: half of the probability needs half of the vocabulary."""
    logits = torch.linspace(0.01, 0.0, VOCAB)[None].repeat(200, 1)
    params = [SamplingParams(temperature=1.0, seed=seed, top_p=0.5) for seed in range(200)]
    tokens = run(logits, params).token_ids
    assert int(tokens.max()) > 1024  # beyond the quick look
    assert int(tokens.max()) < VOCAB // 2 + 10


def test_logprobs_are_of_the_unmodified_logits() -> None:
    logits = torch.stack([logits_of(0), logits_of(1), logits_of(2)])
    rules: dict[str, Any] = {"temperature": 0.0, "logit_bias": ((9, 200.0),)}
    params = [
        SamplingParams(logprobs=2, **rules),
        SamplingParams(**rules),
        SamplingParams(logprobs=0, **rules),
    ]
    sampled = run(logits, params)
    assert sampled.token_ids.tolist() == [9, 9, 9]
    assert sampled.logprobs is not None
    assert sampled.logprobs.rows == (0, 2)
    assert sampled.logprobs.num_top == (2, 0)
    expected = logits.log_softmax(dim=-1)
    torch.testing.assert_close(sampled.logprobs.chosen, expected[[0, 2], 9])
    assert sampled.logprobs.top_ids[0].tolist() == [1, 2]
    torch.testing.assert_close(sampled.logprobs.top[0], expected[0, [1, 2]])


def test_no_logprobs_unless_asked_for() -> None:
    assert run(logits_of(0)[None], [SamplingParams()]).logprobs is None


def test_both_halves_of_the_seed_count() -> None:
    logits = torch.zeros(3, VOCAB)
    seeds = (1, 1 + 2**32, 1)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
    tokens = run(logits, params).token_ids.tolist()
    assert tokens[0] == tokens[2] != tokens[1]


@pytest.mark.parametrize(
    ("words", "banned"),
    [
        (((77,),), {77}),
        (((20, 77),), {77}),
        (((11, 11, 20, 77),), {77}),
        (((11, 20, 77), (9, 9, 77), (20, 78), (77,)), {77, 78}),
        (((*OUTPUT, 77),), {77}),
        (((11, 77),), set[int]()),  # the output ends otherwise
        (((5, 20, 77),), set[int]()),
        (((PROMPT[-1], *OUTPUT, 77),), set[int]()),  # the prompt is no part of it
        (((1,) * 40,), set[int]()),  # longer than all there is
    ],
)
def test_the_token_that_would_complete_a_bad_word_is_masked(
    words: tuple[tuple[int, ...], ...], banned: set[int]
) -> None:
    logits = torch.zeros((3, VOCAB))
    plain = SamplingParams(temperature=0.0)
    # A bias cannot bring it back: it is masked, not made unlikely.
    bias = tuple((token_id, 100.0) for token_id in (77, 78))
    wanted = SamplingParams(temperature=0.0, bad_words=words, logit_bias=bias)
    masked = captured(logits, [plain, wanted, plain])
    assert set(torch.nonzero(masked[1] == -torch.inf)[:, 0].tolist()) == banned
    assert not masked[0].isinf().any()
    assert not masked[2].isinf().any()


@pytest.mark.parametrize("seed", range(4))
def test_the_sampler_and_the_mock_ban_the_same(seed: int) -> None:
    dice = np.random.default_rng(seed)
    words = tuple(
        tuple(dice.choice([5, 11, 20, 77], size=dice.integers(1, 5)).tolist()) for _ in range(8)
    )
    masked = captured(torch.zeros((1, VOCAB)), [SamplingParams(temperature=0.0, bad_words=words)])
    found = set(torch.nonzero(masked[0] == -torch.inf)[:, 0].tolist())
    assert found == completing_ids(words, OUTPUT)


def captured(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Return the logits as greedy rows are judged: the sampler changes them in place."""
    run_in_place(logits, params)
    return logits
