"""Chat templates, rendered as transformers renders them.

The environment is transformers 5's (`utils/chat_template_utils.py`): sandboxed and immutable,
trimmed blocks, loop controls, a `tojson` that escapes no HTML, `raise_exception`, `strftime_now`,
and the `generation` tag, whose body is rendered and whose mark is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import ModelError, RequestError


class ChatTemplate:
    """A compiled template with the model's special tokens.

    Raises:
        ModelError: the source is no valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            msg = f"chat template, line {error.lineno}: {error.message}"
            raise ModelError(msg) from None
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text.

        Args:
            variables: the request's `chat_template_kwargs`; they win over the special tokens.

        Raises:
            RequestError: 400; the template refused these messages, or cannot render them.
        """
        names = {**self._special_tokens, **(variables or {})}
        names.update(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
        )
        names.setdefault("tools", None)
        names.setdefault("documents", None)
        try:
            return self._template.render(names)
        except Exception as error:  # a template's code can raise anything at all
            msg = f"messages: the model's chat template cannot render them: {error}"
            raise RequestError(msg, param="messages", code="chat_template_error") from error


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's tokens for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration is a plain set

    def parse(self, parser: Parser) -> Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(lineno)

    def _render(self, caller: Macro) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    names: dict[str, object] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    cast("dict[str, object]", environment.globals).update(names)
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    # The local time without a zone is what transformers gives its templates.
    return datetime.now().strftime(form)  # noqa: DTZ005
