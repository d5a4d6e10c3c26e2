"""The official `openai` client against a disaggregated cluster on the real model."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.cluster import Cluster, Up

pytestmark = pytest.mark.e2e

ASKED: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of Italy?"},
]


@pytest.fixture
def cluster(up: Up) -> Iterator[Cluster]:
    """Yield the cluster; after the test, nothing may be held there."""
    cluster = up()
    yield cluster
    cluster.wait_until_idle()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with cluster.client() as client:
        yield client


@pytest.fixture
async def asynchronous(cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with cluster.async_client() as client:
        yield client


def text_of(answer: ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


def test_models(client: OpenAI, cluster: Cluster) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [cluster.model]
    assert models[0].object == "model"
    assert client.models.retrieve(cluster.model).id == cluster.model


def test_chat(client: OpenAI, cluster: Cluster) -> None:
    answer = client.chat.completions.create(
        model=cluster.model, messages=ASKED, temperature=0, max_tokens=24
    )
    assert answer.object == "chat.completion"
    assert answer.model == cluster.model
    assert answer.id.startswith("chatcmpl-")
    assert len(answer.choices) == 1
    assert answer.choices[0].message.role == "assistant"
    assert "Rome" in text_of(answer)
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_the_stream_is_the_answer(client: OpenAI, cluster: Cluster) -> None:
    whole = client.chat.completions.create(
        model=cluster.model, messages=ASKED, temperature=0, max_tokens=24
    )
    chunks = list(
        client.chat.completions.create(
            model=cluster.model,
            messages=ASKED,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *content, last = chunks
    assert content[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in content) == text_of(whole)
    reasons = [chunk.choices[0].finish_reason for chunk in content]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len(content) > 5


def test_a_stream_without_usage_has_none(client: OpenAI, cluster: Cluster) -> None:
    chunks = list(
        client.chat.completions.create(
            model=cluster.model, messages=ASKED, temperature=0, max_tokens=3, stream=True
        )
    )
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert [len(chunk.choices) for chunk in chunks] == [1] * len(chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_the_asynchronous_client(asynchronous: AsyncOpenAI, cluster: Cluster) -> None:
    whole = await asynchronous.chat.completions.create(
        model=cluster.model, messages=ASKED, temperature=0, max_tokens=24
    )
    stream = await asynchronous.chat.completions.create(
        model=cluster.model, messages=ASKED, temperature=0, max_tokens=24, stream=True
    )
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == text_of(whole)
    assert "Rome" in text_of(whole)


def test_completions(client: OpenAI, cluster: Cluster) -> None:
    answer = client.completions.create(
        model=cluster.model,
        prompt=["The capital of Italy is", "One, two, three, four,"],
        temperature=0,
        max_tokens=6,
    )
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert "Rome" in answer.choices[0].text
    assert "five" in answer.choices[1].text
    chunks = list(
        client.completions.create(
            model=cluster.model,
            prompt="The capital of Italy is",
            temperature=0,
            max_tokens=6,
            stream=True,
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_samples_differ_and_the_seed_repeats_them(client: OpenAI, cluster: Cluster) -> None:
    def samples(seed: int | None, n: int = 3) -> list[str]:
        answer = client.chat.completions.create(
            model=cluster.model,
            messages=[{"role": "user", "content": "Tell me a story about a fox."}],
            n=n,
            seed=seed,
            max_tokens=16,
        )
        assert [choice.index for choice in answer.choices] == list(range(n))
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 16 * n
        return [choice.message.content or "" for choice in answer.choices]

    first = samples(7)
    assert len(set(first)) == 3
    assert samples(7) == first
    assert samples(7, n=1) == first[:1]
    assert samples(8) != first
    assert samples(None) != samples(None)


def test_samples_stream_together(client: OpenAI, cluster: Cluster) -> None:
    def ask(*, stream: bool) -> dict[int, str]:
        texts = dict.fromkeys(range(3), "")
        if not stream:
            whole = client.completions.create(
                model=cluster.model, prompt="A fox", n=3, seed=3, max_tokens=12
            )
            return {choice.index: choice.text for choice in whole.choices}
        for chunk in client.completions.create(
            model=cluster.model, prompt="A fox", n=3, seed=3, max_tokens=12, stream=True
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        return texts

    assert ask(stream=True) == ask(stream=False)


def test_chat_logprobs(client: OpenAI, cluster: Cluster) -> None:
    answer = client.chat.completions.create(
        model=cluster.model,
        messages=ASKED,
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=5,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content).startswith(text_of(answer))
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for entry in logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-6
        # Greedy: the chosen one is the likeliest, the prefill worker's first token too.
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, values[0])
        assert bytes(entry.bytes or []).decode() == entry.token


def test_completion_logprobs(client: OpenAI, cluster: Cluster) -> None:
    answer = client.completions.create(
        model=cluster.model,
        prompt="The capital of Italy is",
        temperature=0,
        max_tokens=6,
        logprobs=3,
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    tokens, offsets = logprobs.tokens or [], logprobs.text_offset or []
    assert "".join(tokens) == choice.text
    assert offsets == [len("".join(tokens[:at])) for at in range(6)]
    for token, logprob, top in zip(
        tokens, logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True
    ):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 3


def test_a_repeated_prompt_was_cached(client: OpenAI, cluster: Cluster) -> None:
    def ask() -> tuple[int, int]:
        answer = client.completions.create(
            model=cluster.model,
            prompt="Once upon a time there lived a cobbler, " * 8,
            temperature=0,
            max_tokens=4,
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        assert details is not None
        return answer.usage.prompt_tokens, details.cached_tokens or 0

    num_tokens, cold = ask()
    assert (num_tokens > 64, cold) == (True, 0)
    assert ask() == (num_tokens, (num_tokens - 1) // 16 * 16)


def test_token_ids_come_back_on_wish(client: OpenAI, cluster: Cluster) -> None:
    answer = client.completions.create(
        model=cluster.model,
        prompt=[504, 3575, 282, 8250, 314],
        temperature=0,
        max_tokens=5,
        extra_body={"return_token_ids": True},
    )
    fields = answer.choices[0].model_dump()
    assert fields["prompt_token_ids"] == [504, 3575, 282, 8250, 314]
    assert len(fields["token_ids"]) == 5
    again = client.completions.create(
        model=cluster.model,
        prompt=[*fields["prompt_token_ids"], *fields["token_ids"][:3]],
        temperature=0,
        max_tokens=2,
        extra_body={"return_token_ids": True},
    )
    assert again.choices[0].model_dump()["token_ids"] == fields["token_ids"][3:]


def test_an_echo_is_scored(client: OpenAI, cluster: Cluster) -> None:
    """What lm-eval-harness and the old OpenAI examples do with a text: no token is generated."""
    text = "The capital of Italy is Rome."
    wishes = ("always", "never")
    scored = [
        client.completions.create(
            model=cluster.model,
            prompt=[text, "The"],
            echo=True,
            logprobs=1,
            max_tokens=0,
            extra_headers={"x-dovetail-disaggregate": wish},
        )
        for wish in wishes
    ]
    for answer in scored:
        whole, one = answer.choices
        assert (whole.text, whole.finish_reason, one.text) == (text, "length", "The")
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 0)
    logprobs = [answer.choices[0].logprobs for answer in scored]
    assert logprobs[0] is not None
    assert logprobs[1] is not None
    assert logprobs[0].tokens == ["The", " capital", " of", " Italy", " is", " Rome", "."]
    first, *rest = logprobs[0].token_logprobs or []
    assert first is None
    assert rest == pytest.approx((logprobs[1].token_logprobs or [])[1:], abs=0.1)
    assert rest[4] > -1.0, "Rome is what follows"
    streamed = client.completions.create(
        model=cluster.model,
        prompt=text,
        echo=True,
        logprobs=1,
        temperature=0,
        max_tokens=3,
        stream=True,
    )
    assert "".join(chunk.choices[0].text for chunk in streamed).startswith(text)


def test_a_prompt_is_scored_beside_its_answer(client: OpenAI, cluster: Cluster) -> None:
    answer = client.chat.completions.create(
        model=cluster.model,
        messages=ASKED,
        temperature=0,
        max_tokens=4,
        n=2,
        extra_body={"prompt_logprobs": 2},
    )
    assert answer.usage is not None
    positions = answer.model_dump()["prompt_logprobs"]
    assert len(positions) == answer.usage.prompt_tokens
    assert positions[0] is None
    assert all(2 <= len(one) <= 3 for one in positions[1:])
    for one in positions[1:]:
        ranks = {entry["rank"]: entry["logprob"] for entry in one.values()}
        assert ranks[1] == max(ranks.values()) <= 0.0


def test_stop_strings(client: OpenAI, cluster: Cluster) -> None:
    for stop in (" four", [", four", "nine"]):
        answer = client.completions.create(
            model=cluster.model,
            prompt="One, two, three, four, five. One, two, three",
            temperature=0,
            max_tokens=16,
            stop=stop,
        )
        assert answer.choices[0].text == ("," if stop == " four" else "")
        assert answer.choices[0].finish_reason == "stop"


def test_slips_are_bad_requests(client: OpenAI, cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError) as slip:
        client.chat.completions.create(model=cluster.model, messages=ASKED, temperature=9)
    assert (slip.value.param, slip.value.code) == ("temperature", "invalid_value")
    assert slip.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(
            model=cluster.model, messages=ASKED, response_format={"type": "json_object"}
        )
    assert unsupported.value.code == "unsupported_parameter"
    assert unsupported.value.param == "response_format"


def test_a_prompt_beyond_the_context(client: OpenAI, cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=cluster.model, prompt=[1] * 100_000)
    assert refused.value.code == "context_length_exceeded"


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=ASKED)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


async def test_keys(up: Up) -> None:
    cluster = up("--executor", "mock", "--set", "api.keys=one,two")
    async with cluster.async_client() as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.chat.completions.create(model=cluster.model, messages=ASKED)
        assert refused.value.code == "invalid_api_key"
        known = client.with_options(api_key="two")
        answer = await known.chat.completions.create(
            model=cluster.model, messages=ASKED, max_tokens=2
        )
        assert len(answer.choices) == 1
