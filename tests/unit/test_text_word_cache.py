"""Ids of words that came before are those that `tokenizers` gives, or it is asked itself."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, trainers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from router.text.bpe_pre_tokenizers import SPLITTING_BY_NAME, pre_tokenizer
from router.text.gguf_tokenizer import load_gguf
from router.text.text_model import TextModel
from router.text.tokenizer_source import TokenizerSource
from router.text.word_cache import MAX_CHARS, WordCache, ascii_pattern, read_word_cache
from tests.nasty_texts import NASTY_TEXTS
from tests.router_server import smollm2_path, smollm2_text

PARTS = [
    *(
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\x0b",
        "\x1c",
        "\x00",
        "a",
        "Word",
        "it's",
        "'LL",
        "9",
        "123",
    ),
    *(
        ".",
        "?!",
        "/",
        "#x",
        "_",
        "^",
        "`~",
        "{}",
        "<|im_start|>",
        "<|im_end|>",
        "<|im",
        "[a-z]",
        "$",
    ),
]
NEAR_ASCII = ("é", "\u0661", "\u2028")


def texts(count: int) -> list[str]:
    dice = random.Random(7)
    return ["".join(dice.choices(PARTS, k=dice.randint(0, 12))) for _ in range(count)]


def byte_level(name: str) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer(SPLITTING_BY_NAME[name])
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    tokenizer.train_from_iterator([" ".join(PARTS), "word by word 123 456"], trainer)
    return tokenizer


def cache_of(tokenizer: Tokenizer, **changes: Any) -> WordCache | None:
    return read_word_cache(tokenizer, json.loads(tokenizer.to_str()) | changes)


def test_a_models_texts_have_the_ids_that_its_tokenizer_gives() -> None:
    tokenizer = load_gguf(smollm2_path()).tokenizer
    assert cache_of(tokenizer) is not None
    for text in [*NASTY_TEXTS, *texts(2000), *NEAR_ASCII, "word " * MAX_CHARS]:
        assert smollm2_text().encode(text) == tokenizer.encode(text).ids, text


@pytest.mark.parametrize("name", sorted(SPLITTING_BY_NAME))
def test_words_are_those_of_the_patterns(name: str) -> None:
    tokenizer = byte_level(name)
    cache = cache_of(tokenizer)
    assert cache is not None
    splitter = tokenizer.pre_tokenizer
    assert splitter is not None
    for text in texts(150):
        spans = [span for _, span in splitter.pre_tokenize_str(text)]
        assert cache.words(text) == [text[start:end] for start, end in spans], text


def test_special_tokens_around_a_text_are_the_tokenizers_business() -> None:
    tokenizer = byte_level("gpt-2")
    tokenizer.add_special_tokens(["<s>"])
    bos = tokenizer.token_to_id("<s>")
    assert bos is not None
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    text = TextModel(TokenizerSource("name", tokenizer, (bos,), {}, None, 0))
    bare = tokenizer.encode("a word", add_special_tokens=False).ids
    assert text.encode("a word") == [bos, *bare]
    assert text.encode("a word", add_special_tokens=False) == bare


def test_words_are_learned_anew_once_they_are_too_many() -> None:
    tokenizer = byte_level("gpt-2")
    cache = WordCache(tokenizer, [re.compile("( )")], {}, max_words=2)
    text = "word by word, word by word " + 40 * "x"
    for _ in range(2):
        assert cache.encode("a" + text) == [
            token_id
            for word in cache.words("a" + text)
            for token_id in tokenizer.encode(word, add_special_tokens=False).ids
        ]


def split(regex: str, **changes: object) -> dict[str, object]:
    whole = {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }
    return whole | changes


ALPHABET = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


@pytest.mark.parametrize(
    "steps",
    [
        [split(r"\p{N}", behavior="Removed")],
        [split(r"\p{N}", invert=True)],
        [split("", pattern={"String": " "})],
        [split(r"\w+")],
        [split("(a)|b")],
        [{"type": "Whitespace"}],
        [ALPHABET | {"add_prefix_space": True}],
    ],
)
def test_a_splitter_that_is_not_understood_has_none(steps: list[dict[str, object]]) -> None:
    tokenizer = byte_level("gpt-2")
    sequence = {"type": "Sequence", "pretokenizers": [*steps, ALPHABET]}
    assert cache_of(tokenizer, pre_tokenizer=sequence) is None
    assert cache_of(tokenizer, pre_tokenizer=None) is None
    assert cache_of(tokenizer, pre_tokenizer={"type": "Metaspace"}) is None
    assert cache_of(tokenizer, pre_tokenizer=ALPHABET | {"add_prefix_space": True}) is None


def test_digits_and_the_alphabets_own_pattern_are_understood() -> None:
    tokenizer = byte_level("gpt-2")
    own = ALPHABET | {"use_regex": True}
    for individual, expected in ((True, ["a", " ", "1", "2"]), (False, ["a", " ", "12"])):
        digits = {"type": "Digits", "individual_digits": individual}
        sequence = {"type": "Sequence", "pretokenizers": [digits, own]}
        cache = cache_of(tokenizer, pre_tokenizer=sequence)
        assert cache is not None
        assert cache.words("a 12") == expected


def test_a_tokenizer_that_does_more_has_none() -> None:
    tokenizer = byte_level("gpt-2")
    layout = json.loads(tokenizer.to_str())
    assert cache_of(tokenizer, normalizer={"type": "NFC"}) is not None
    assert cache_of(tokenizer, normalizer={"type": "Lowercase"}) is None
    assert cache_of(tokenizer, model=layout["model"] | {"dropout": 0.1}) is None
    assert cache_of(tokenizer, model={"type": "Unigram"}) is None
    assert cache_of(tokenizer, truncation={"max_length": 5}) is None
    stripping = copy.deepcopy(tokenizer)
    stripping.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert cache_of(stripping) is None


@pytest.mark.parametrize(
    "pattern", [r"\p{Greek}", r"\d", r"[\S]", "[a[b]]", "a]", r"[\p{M}]", r"[^\p{M}]", r"\p{M}"]
)
def test_a_pattern_that_is_not_understood_has_no_ascii(pattern: str) -> None:
    assert ascii_pattern(pattern) is None


def test_a_pattern_in_ascii() -> None:
    assert ascii_pattern(r" ?[^\s\p{L}]+\S|\p{N}\r") == r" ?[^\t-\r A-Za-z]+[^\t-\r ]|[0-9]\r"
