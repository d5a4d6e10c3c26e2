"""Token ids of words that came before, for short texts in ASCII: nearly all that clients send.

Byte-level BPE splits a text into words by patterns and encodes each by itself. `tokenizers` carries
every word's place in the text through each step (18 us for a sentence); here the same patterns
split with `re`, where in ASCII they mean the same, and a word is encoded once (5 us).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from router.text.bpe_pre_tokenizers import SPLITTING_BY_NAME

MAX_CHARS = 2048
"""Of a text; longer ones are left to `tokenizers`, which lets other threads run meanwhile."""

_MAX_WORD_CHARS = 32
"""Of a word that is kept: so many take a few MB."""

_PROPERTIES: Mapping[str, str] = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "N": "0-9",
    "Nd": "0-9",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
    "Mn": "",
    "Mc": "",
    "P": r"!-#%-*,-/:;?@\[-\]_{}",
    "S": r"$+<=>\^`|~",
}
r"""What `\p{...}` holds of ASCII, as it is written inside a character class."""

_SPACES = r"\t-\r "
_PLAIN_ESCAPES = frozenset("rnt.-/[]\\^$*+?(){}|'\"")
_PIECE = re.compile(r"\\p\{(\w+)\}|\\(.)|(.)", re.DOTALL)

_ALPHABET = ByteLevel(add_prefix_space=False, use_regex=False)
_WRITTEN = {code: _ALPHABET.pre_tokenize_str(chr(code))[0][0] for code in range(128)}
"""ASCII characters as byte-level vocabularies write them."""


class WordCache:
    """Encodes as its tokenizer does, without special tokens around the text.

    Args:
        patterns: compiled, one after the other, each in a group: what matches and what does not
            are both pieces.
        added: ids of the tokens that are found in a text before it is split.
        max_words: kept; then all are forgotten and learned anew.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        patterns: Sequence[re.Pattern[str]],
        added: Mapping[str, int],
        *,
        max_words: int = 1 << 16,
    ) -> None:
        self._model: Any = tokenizer.model
        self._patterns = tuple(patterns)
        longest_first = sorted(added, key=len, reverse=True)
        self._added = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._ids_by_added = {token: (token_id,) for token, token_id in added.items()}
        self._ids_by_word: dict[str, tuple[int, ...]] = {}
        self._max_words = max_words

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text of ASCII."""
        if not self._ids_by_added:
            return self._encode_plain(text)
        ids: list[int] = []
        for piece in self._added.split(text):
            ids += self._ids_by_added.get(piece) or self._encode_plain(piece)
        return ids

    def words(self, text: str) -> list[str]:
        """Return the pieces that are encoded one by one; they join to the text."""
        pieces = [text]
        for pattern in self._patterns:
            split = pattern.split
            pieces = [part for piece in pieces for part in split(piece) if part]
        return pieces

    def _encode_plain(self, text: str) -> list[int]:
        known = self._ids_by_word
        ids: list[int] = []
        for word in self.words(text):
            ids += known.get(word) or self._learn(word)
        return ids

    def _learn(self, word: str) -> tuple[int, ...]:
        ids = tuple([token.id for token in self._model.tokenize(word.translate(_WRITTEN))])
        if len(word) <= _MAX_WORD_CHARS:
            if len(self._ids_by_word) >= self._max_words:
                self._ids_by_word.clear()
            self._ids_by_word[word] = ids
        return ids


def read_word_cache(tokenizer: Tokenizer, layout: Mapping[str, Any]) -> WordCache | None:
    """Return a cache for a tokenizer, None where it does anything that is not understood here.

    Args:
        layout: the tokenizer as JSON.
    """
    model = layout["model"]
    is_plain = model["type"] == "BPE" and not model.get("dropout") and not layout["truncation"]
    if not is_plain or (layout["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return None
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    if any(token[flag] for token in layout["added_tokens"] for flag in flags):
        return None
    written = _patterns(layout["pre_tokenizer"])
    if written is None:
        return None
    compiled = [re.compile(f"({pattern})") for pattern in written]
    if any(pattern.groups != 1 for pattern in compiled):
        return None
    added = {token["content"]: token["id"] for token in layout["added_tokens"]}
    return WordCache(tokenizer, compiled, added)


def _patterns(pre_tokenizer: Mapping[str, Any] | None) -> list[str] | None:
    """Return the patterns of a pre-tokenizer that ends in byte-level BPE's alphabet."""
    if pre_tokenizer is None:
        return None
    is_sequence = pre_tokenizer["type"] == "Sequence"
    *splits, last = pre_tokenizer["pretokenizers"] if is_sequence else [pre_tokenizer]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    patterns = [_pattern(split) for split in splits]
    if last["use_regex"]:
        patterns.append(ascii_pattern(SPLITTING_BY_NAME["gpt-2"].patterns[0]))
    known = [pattern for pattern in patterns if pattern is not None]
    return known if len(known) == len(patterns) else None


def _pattern(split: Mapping[str, Any]) -> str | None:
    if split["type"] == "Digits":
        return "[0-9]" if split["individual_digits"] else "[0-9]+"
    if split["type"] != "Split" or split["behavior"] != "Isolated" or split["invert"]:
        return None
    pattern = split["pattern"].get("Regex")
    return None if pattern is None else ascii_pattern(pattern)


def ascii_pattern(pattern: str) -> str | None:
    """Return a pattern of Oniguruma's as `re` writes what it means for ASCII, None where it has
    something that is not known here."""
    parts: list[str] = []
    in_class = False
    for match in _PIECE.finditer(pattern):
        name, escaped, char = match.groups()
        inside: str | None = None
        if name is not None:
            inside = _PROPERTIES.get(name)
        elif escaped == "s":
            inside = _SPACES
        elif escaped == "S" and not in_class:
            inside = "^" + _SPACES
        elif escaped is not None:
            if escaped not in _PLAIN_ESCAPES:
                return None
            parts.append(match.group())
            continue
        elif (char == "[") == in_class and char in "[]":
            return None  # a class within a class, or none to end
        else:
            in_class = in_class != (char in "[]")
            parts.append(char)
            continue
        if inside is None or not (inside or in_class):
            return None
        parts.append(inside if in_class else f"[{inside}]")
    written = "".join(parts)
    return None if "[]" in written or "[^]" in written else written
