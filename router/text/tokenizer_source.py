"""What a model's files say about its text, whichever format they have."""

from __future__ import annotations

import msgspec
from tokenizers import Tokenizer


class TokenizerSource(msgspec.Struct, frozen=True):
    """A tokenizer with what belongs to it.

    Attributes:
        name: the model's own name.
        eos_token_ids: ids that end a generation, in ascending order.
        special_tokens: the template's variables (`bos_token`, `eos_token`, ...).
        chat_template: Jinja source, None where the model has none.
        tool_use_template: the one for requests with tools, where the model has another for them.
        max_model_len: the longest context that the model was made for; 0 if its files do not say.
    """

    name: str
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    chat_template: str | None
    max_model_len: int
    tool_use_template: str | None = None
