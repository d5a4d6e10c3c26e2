"""Everything that the router knows about a model's text, behind one object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from core.errors import ModelError, RequestError
from router.text.chat_template import ChatTemplate
from router.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from router.text.gguf_tokenizer import load_gguf
from router.text.hf_directory import load_directory
from router.text.token_bytes import read_decoder
from router.text.tokenizer_source import TokenizerSource
from router.text.word_cache import MAX_CHARS, read_word_cache


class TextModel:
    """A tokenizer, its template and its end tokens. Immutable after `load`; safe in threads.

    Attributes:
        name: the model's own name (`general.name`, or the directory's).
        vocab_size: one more than the largest token id.
        eos_token_ids: ids that end a generation.
        max_model_len: the longest context of the model; 0 if its files do not say.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._tokenizer = source.tokenizer
        self._template = _compiled(source.chat_template, source)
        self._tool_use_template = _compiled(source.tool_use_template, source)
        self.name = source.name
        self.eos_token_ids = source.eos_token_ids
        self.max_model_len = source.max_model_len
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        special = self._tokenizer.get_added_tokens_decoder().items()
        self._special_ids = frozenset(index for index, added in special if added.special)
        layout = json.loads(self._tokenizer.to_str())
        self._word_cache = read_word_cache(self._tokenizer, layout)
        self._adds_special_tokens = self._encode("a") != self._encode("a", add_special_tokens=False)
        decoder = read_decoder(layout["decoder"])
        self._strips_first_space = decoder is not None and decoder.strips_first_space
        self._bytes_by_id: list[bytes] | None = None
        if decoder is not None:
            self._bytes_by_id = [b""] * self.vocab_size
            for token, index in vocabulary.items():
                self._bytes_by_id[index] = decoder.token_bytes(token)
            self._shown_bytes_by_id = [
                b"" if index in self._special_ids else shown
                for index, shown in enumerate(self._bytes_by_id)
            ]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a Hugging Face directory or a GGUF file.

        Raises:
            ModelError: names the file, what is wrong with it and what would be right.
        """
        if path.is_dir():
            return cls(load_directory(path))
        if path.is_file():
            return cls(load_gguf(path))
        msg = f"{path}: no such model; give a GGUF file or a Hugging Face directory"
        raise ModelError(msg)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written in it are special tokens, as in
        transformers and vLLM. Releases the GIL while it works on a long text."""
        cache = self._word_cache
        is_bare = not (add_special_tokens and self._adds_special_tokens)
        if cache is not None and is_bare and len(text) <= MAX_CHARS and text.isascii():
            return cache.encode(text)
        return self._encode(text, add_special_tokens=add_special_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # The fast one, which exists for batches alone, does not say where in the text a token was.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole token list."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> tuple[str, bytes]:
        """Return one token as (text, bytes); a part of a character shows as U+FFFD in the text."""
        if not 0 <= token_id < self.vocab_size:
            return "", b""
        if self._bytes_by_id is not None:
            raw = self._bytes_by_id[token_id]
            return raw.decode("utf-8", "replace"), raw
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text, text.encode()

    def token_string(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it (`Ġthe`)."""
        return self._tokenizer.id_to_token(token_id) or ""

    def detokenizer(
        self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> Detokenizer:
        """Return a fresh incremental detokenizer for one sample.

        Args:
            after: the prompt. SentencePiece's decoders drop the space that begins a text; an
                answer goes on with a text, so it keeps the space unless the prompt shows nothing.
        """
        if self._bytes_by_id is None:
            return WindowDetokenizer(
                self._tokenizer, skip_special_tokens=skip_special_tokens, after=after
            )
        table = self._shown_bytes_by_id if skip_special_tokens else self._bytes_by_id
        begins_text = self._strips_first_space and not any(
            table[index] for index in after if 0 <= index < self.vocab_size
        )
        return ByteDetokenizer(table, strip_first_space=begins_text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text; encode it with `add_special_tokens=False`: a template writes
        its own BOS.

        A model may have another template for requests with `tools` among the variables.

        Raises:
            RequestError: 400; the model has no chat template, or it refuses these messages.
        """
        has_tools = (variables or {}).get("tools") is not None
        template = (self._tool_use_template if has_tools else None) or self._template
        if template is None:
            msg = f"messages: the model {self.name!r} has no chat template; use /v1/completions"
            raise RequestError(msg, param="messages", code="chat_template_error")
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )


def _compiled(template: str | None, source: TokenizerSource) -> ChatTemplate | None:
    return None if template is None else ChatTemplate(template, source.special_tokens)
