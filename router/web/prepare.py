"""From a validated body to what the dispatcher takes: template, token ids, limits, ids."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from core.block_hash import namespace_of
from core.errors import RequestError
from core.ids import RequestId
from core.lifetime import Lifetime
from core.request import EngineRequest
from router.api import continuation
from router.api.answers import CHAT, COMPLETION, Shape
from router.api.context import COMPLETION_MAX_TOKENS, fit_to_context, truncate_prompt
from router.api.generation_params import GenerationParams
from router.api.requests import ChatRequest, CompletionRequest, Prompt
from router.dispatch.interface import Disaggregate, GenerateRequest, ServedModel
from router.web.context import ApiContext


class Wishes(msgspec.Struct, frozen=True):
    """What the debug headers say."""

    disaggregate: Disaggregate = Disaggregate.AUTO
    trace: bool = False


class Prepared(msgspec.Struct, frozen=True):
    """One HTTP request, ready to start.

    Attributes:
        requests: one a prompt.
        lifetimes: one a prompt, ARRIVED stamped.
        echoes: one a prompt: its text where it is echoed, else empty.
    """

    shape: Shape
    params: GenerationParams
    model: ServedModel
    requests: tuple[GenerateRequest, ...]
    lifetimes: tuple[Lifetime, ...]
    wishes: Wishes
    echoes: tuple[str, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.request.prompt) for request in self.requests)


def check_model(asked: str | None, model: ServedModel) -> None:
    """Refuse another model with 404; a request without one means the served one."""
    if asked is not None and asked != model.name:
        msg = f"model = {asked!r}: is not served here; {model.name!r} is"
        raise RequestError(msg, status=404, param="model", code="model_not_found")


async def prompts_of(
    context: ApiContext, request: ChatRequest | CompletionRequest
) -> list[tuple[int, ...]]:
    """Render and tokenize.

    Raises:
        RequestError: 400; the chat template refused the messages.
    """
    is_chat = isinstance(request, ChatRequest)
    prompts: Sequence[Prompt] = [_render(context, request)] if is_chat else request.prompts
    return [await _token_ids(context, one, request.add_special_tokens) for one in prompts]


def _render(context: ApiContext, request: ChatRequest) -> str:
    continues = request.continue_final_message
    rendered = context.text.render_chat(
        continuation.marked(request.messages) if continues else request.messages,
        add_generation_prompt=request.add_generation_prompt,
        variables=request.template_variables,
    )
    return continuation.cut_at_mark(rendered) if continues else rendered


async def _token_ids(
    context: ApiContext, prompt: Prompt, add_special_tokens: bool
) -> tuple[int, ...]:
    if isinstance(prompt, tuple):
        return prompt
    encode = context.text.encode
    ids = await context.off_loop(len(prompt), encode, prompt, add_special_tokens=add_special_tokens)
    return tuple(ids)


async def prepare(
    context: ApiContext,
    request: ChatRequest | CompletionRequest,
    wishes: Wishes,
    request_ids: Sequence[RequestId],
    lifetimes: Sequence[Lifetime],
) -> Prepared:
    """Return the requests to start.

    Args:
        request_ids: one a prompt, never used before.
        lifetimes: one a prompt.

    Raises:
        RequestError: 404 for another model, 400 for a prompt that is empty or does not fit.
    """
    model = context.model()
    params = request.params
    check_model(params.model, model)
    if params.bad_words:
        bad_words = _bad_word_ids(context, params.bad_words)
        sampling = msgspec.structs.replace(params.sampling, bad_words=bad_words)
        params = msgspec.structs.replace(params, sampling=sampling)
    is_chat = isinstance(request, ChatRequest)
    default_max = None if is_chat else COMPLETION_MAX_TOKENS
    limit = model.max_model_len
    whole_prompts = await prompts_of(context, request)
    prompts = [truncate_prompt(prompt, params, max_model_len=limit) for prompt in whole_prompts]
    echoes = [""] * len(prompts)
    if isinstance(request, CompletionRequest) and params.echo:
        for at, (given, whole) in enumerate(zip(request.prompts, whole_prompts, strict=True)):
            echoes[at] = await _echo(context, given, whole, prompts[at])
    requests = tuple(
        GenerateRequest(
            request=EngineRequest(
                request_id=request_id,
                prompt=prompt,
                sampling=fit_to_context(
                    params,
                    len(prompt),
                    max_model_len=limit,
                    default_max=default_max,
                    seed=None if params.has_seed else context.entropy.bits64(),
                ),
                namespace=namespace_of(cache_salt=params.cache_salt),
                priority=params.priority,
            ),
            timeout_s=context.config.router.request_timeout_s,
            disaggregate=wishes.disaggregate,
        )
        for request_id, prompt in zip(request_ids, prompts, strict=True)
    )
    shape = CHAT if is_chat else COMPLETION
    return Prepared(shape, params, model, requests, tuple(lifetimes), wishes, tuple(echoes))


async def _echo(
    context: ApiContext, given: Prompt, whole: tuple[int, ...], kept: tuple[int, ...]
) -> str:
    """Return a prompt as text: as it was given, or what token ids, or those that were kept, say."""
    if isinstance(given, str) and len(kept) == len(whole):
        return given
    decode = context.text.decode
    return await context.off_loop(len(kept), decode, kept, skip_special_tokens=False)


def _bad_word_ids(context: ApiContext, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return each word's tokens as it stands at the beginning and, where they begin otherwise,
    after a space.

    vLLM takes the second only where it has as many tokens as the first, so that a word that is one
    token after a space and several without is generated there; here it is not.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        ids = tuple(context.text.encode(bare, add_special_tokens=False))
        spaced = tuple(context.text.encode(" " + bare, add_special_tokens=False))
        if not ids:
            continue  # an empty word is never completed
        found[ids] = None
        if spaced[0] != ids[0]:
            found[spaced] = None
    return tuple(found)
