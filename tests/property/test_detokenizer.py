"""Increments join to the full decode, wherever the borders between bytes, tokens and arrivals
are."""

from __future__ import annotations

import functools
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from router.text.detokenizer import ByteDetokenizer, Detokenizer
from router.text.stop_strings import StopMatcher
from router.text.text_model import TextModel
from router.text.token_bytes import BYTE_BY_CHAR
from router.text.tokenizer_source import TokenizerSource
from tests.router_server import smollm2_text

splits = st.lists(st.integers(0, 60), max_size=8)


@functools.cache
def byte_fallback_text(*, is_windowed: bool) -> TextModel:
    """A tokenizer of SentencePiece's kind: ▁ for spaces, one token a byte for the rest.

    Args:
        is_windowed: with a step in its decoder that is not known to concern single tokens.
    """
    unknown = [decoders.Replace("\x00", "\x00")] if is_windowed else []
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "é"]
    tokenizer = Tokenizer(
        BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
            *unknown,
        ]
    )
    model = TextModel(TokenizerSource("tiny", tokenizer, (), {}, None, 0))
    assert isinstance(model.detokenizer(), ByteDetokenizer) is not is_windowed
    return model


@functools.cache
def id_by_byte() -> dict[int, int]:
    """The tokens of one byte each; SmolLM2 lacks some."""
    ids = {byte: smollm2_text()._tokenizer.token_to_id(char) for char, byte in BYTE_BY_CHAR.items()}
    return {byte: token_id for byte, token_id in ids.items() if token_id is not None}


def _has_tokens(char: str) -> bool:
    return id_by_byte().keys() >= set(char.encode())


characters = st.characters(exclude_categories=["Cs"]).filter(_has_tokens)
texts = st.text(characters, max_size=40) | st.sampled_from(
    ["👩‍👩‍👧‍👦 famille", "naïve 日本語 ½ 🇩🇪", "<|im_end|>é"]
)


def _fed(detokenizer: Detokenizer, ids: list[int], borders: list[int]) -> list[str]:
    """Feed `ids` cut at `borders`; return the increments, the flushed rest last."""
    cuts = [0, *sorted(min(border, len(ids)) for border in borders), len(ids)]
    pieces = [detokenizer.feed(ids[a:b]) for a, b in pairwise(cuts)]
    return [*pieces, detokenizer.flush()]


@settings(deadline=None)  # the first example loads the model
@given(texts, splits, st.booleans())
def test_text_survives_any_arrival(text: str, borders: list[int], skip: bool) -> None:
    model = smollm2_text()
    ids = model.encode(text)
    pieces = _fed(model.detokenizer(skip_special_tokens=skip), ids, borders)
    assert "".join(pieces) == model.decode(ids, skip_special_tokens=skip)
    assert skip or "".join(pieces) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30), splits, st.booleans())
def test_any_tokens_equal_the_full_decode(ids: list[int], borders: list[int], skip: bool) -> None:
    model = smollm2_text()
    pieces = _fed(model.detokenizer(skip_special_tokens=skip), ids, borders)
    assert "".join(pieces) == model.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(st.binary(max_size=24), splits)
def test_any_bytes_equal_the_full_decode(raw: bytes, borders: list[int]) -> None:
    """One token a byte: cuts within characters, and bytes that are no UTF-8 at all."""
    model = smollm2_text()
    ids = [id_by_byte()[byte] for byte in raw if byte in id_by_byte()]
    pieces = _fed(model.detokenizer(), ids, borders)
    assert "".join(pieces) == model.decode(ids)


@settings(deadline=None)
@given(texts, splits)
def test_nothing_incomplete_leaves_early(text: str, borders: list[int]) -> None:
    model = smollm2_text()
    pieces = _fed(model.detokenizer(skip_special_tokens=False), model.encode(text), borders)
    joined = ""
    for piece in pieces:
        joined += piece
        assert text.startswith(joined)


@settings(deadline=None)
@given(st.text(alphabet="abc é😀日", max_size=30), splits, st.integers(0, 30), st.booleans())
def test_other_tokenizers_equal_the_full_decode(
    text: str, borders: list[int], cut: int, is_windowed: bool
) -> None:
    model = byte_fallback_text(is_windowed=is_windowed)
    ids = model.encode(text)
    pieces = _fed(model.detokenizer(), ids, borders)
    assert "".join(pieces) == model.decode(ids)
    prompt = model.encode(text[:cut])
    answer = _fed(model.detokenizer(after=prompt), model.encode(text[cut:]), borders)
    whole = model.decode([*prompt, *model.encode(text[cut:])])
    assert model.decode(prompt) + "".join(answer) == whole


@settings(deadline=None)
@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    splits,
)
def test_stop_strings_do_not_depend_on_borders(
    text: str, stops: list[str], borders: list[int]
) -> None:
    """A match ends at the earliest end; of those that end there, the longest is the one."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    end, _, stop = min(ends, default=(len(text), 0, ""))
    matcher = StopMatcher(stops)
    cuts = [0, *sorted(min(border, len(text)) for border in borders), len(text)]
    released = [matcher.feed(text[a:b]) for a, b in pairwise(cuts)]
    joined = "".join([*released, matcher.flush()])
    assert joined == (text[: end - len(stop)] if stop else text)
    assert matcher.matched == (stop or None)
