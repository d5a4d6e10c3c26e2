"""The `tokenizer.ggml.*` keys of a GGUF file, whatever kind of tokenizer they describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
from tokenizers import AddedToken, Tokenizer, processors

from core.errors import ModelError
from router.text.gguf_metadata import GgufValue, read_metadata

UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6
"""`tokenizer.ggml.token_type`: 1 is a piece of text; 2 and 3 are special; 4 is one that text is
split at; 6 is one byte."""

_PREFIX = "tokenizer.ggml."


class GgufVocabulary(msgspec.Struct, frozen=True):
    """Tokens and flags.

    Attributes:
        path: the file, for messages.
        metadata: all of the header by key.
        tokens: by id.
        kinds: `token_type` by id, as many as there are tokens.
    """

    path: Path
    metadata: dict[str, GgufValue]
    tokens: list[str]
    kinds: list[int]

    def value(self, name: str) -> GgufValue | None:
        """Return `tokenizer.ggml.NAME`, None where the file has none."""
        return self.metadata.get(_PREFIX + name)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a flag; a key of another type counts as absent."""
        value = self.value(name)
        return value if isinstance(value, bool) else default

    def token_id(self, name: str) -> int | None:
        """Return the id under a key; None where there is none, or none of the vocabulary."""
        value = self.value(name)
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            return None
        return value

    def array(self, name: str) -> list[Any]:
        """Return a list that the tokenizer cannot do without.

        Raises:
            ModelError: it is missing.
        """
        value = self.value(name)
        if not isinstance(value, list):
            msg = f"{self.path}: {_PREFIX}{name} is missing; convert the model with its tokenizer"
            raise ModelError(msg)
        return value


def read_vocabulary(path: Path) -> GgufVocabulary:
    """Read a file's header.

    Raises:
        ModelError: no GGUF file, or one without tokens.
    """
    bare = GgufVocabulary(path, read_metadata(path), [], [])
    tokens = cast("list[str]", bare.array("tokens"))
    kinds = bare.value("token_type")
    given = cast("list[int]", kinds) if isinstance(kinds, list) else []
    rest = [1] * (len(tokens) - len(given))
    return msgspec.structs.replace(bare, tokens=tokens, kinds=[*given[: len(tokens)], *rest])


def add_special_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Make the tokenizer find special and user-defined tokens in a text."""
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind in (UNKNOWN, CONTROL):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    # The stubs of `tokenizers` leave these lists untyped.
    tokenizer.add_special_tokens(special)  # pyright: ignore[reportUnknownMemberType]
    tokenizer.add_tokens(plain)  # pyright: ignore[reportUnknownMemberType]


def add_bos_and_eos(tokenizer: Tokenizer, vocabulary: GgufVocabulary, *, default_bos: bool) -> None:
    """Make `encode` put BOS before and EOS after a text, where the file or its kind says so."""
    ends = {
        "bos": vocabulary.flag("add_bos_token", default=default_bos),
        "eos": vocabulary.flag("add_eos_token", default=False),
    }
    ids = {
        name: index
        for name, is_added in ends.items()
        if is_added and (index := vocabulary.token_id(f"{name}_token_id")) is not None
    }
    if ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[name for name in ("bos", "$A", "eos") if name == "$A" or name in ids],
            special_tokens=[
                {"id": name, "ids": [index], "tokens": [vocabulary.tokens[index]]}
                for name, index in ids.items()
            ],
        )
