"""Chat messages: what the client sent, as the chat template wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from core.errors import RequestError
from router.api.fields import FieldReader, refuse, refuse_unsupported

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEMPLATE_KEYS = ("name", "tool_call_id")


class ReadMessages(msgspec.Struct, frozen=True):
    """Messages for the template, and the names of fields that were ignored.

    Attributes:
        messages: objects with `role`, `content` (always a string), and `name`, `tool_call_id`
            where they came.
    """

    messages: tuple[dict[str, Any], ...]
    ignored: tuple[str, ...]


def read_messages(value: object) -> ReadMessages:
    """Validate `messages`.

    Raises:
        RequestError: 400; names the message's field, its value and what would be right.
    """
    if not isinstance(value, list):
        refuse("messages", value, "a list of messages")
    items = cast("list[object]", value)
    if not items:
        msg = "messages = []: must hold at least one message"
        raise RequestError(msg, param="messages", code="empty_prompt")
    ignored: dict[str, None] = {}
    messages = tuple(_message(f"messages[{at}]", item, ignored) for at, item in enumerate(items))
    return ReadMessages(messages, tuple(ignored))


def _message(where: str, item: object, ignored: dict[str, None]) -> dict[str, Any]:
    if not isinstance(item, dict):
        refuse(where, item, "an object with role and content")
    given = cast("dict[str, Any]", item)
    reader = FieldReader(given, where + ".")
    role = reader.raw("role")
    if role not in _ROLES:
        refuse(f"{where}.role", role, "one of " + ", ".join(f'"{one}"' for one in _ROLES))
    message: dict[str, Any] = {"role": role, "content": _content(f"{where}.content", reader)}
    for key in _TEMPLATE_KEYS:
        text = reader.text(key)
        if text is not None:
            message[key] = text
    for key in ("tool_calls", "function_call", "audio"):
        if value := reader.raw(key):
            refuse_unsupported(f"{where}.{key}", value)
    for name in reader.unknown():
        key = name.removeprefix(where + ".")
        if given[key] not in (None, "", [], {}):
            ignored[f"messages[].{key}"] = None
    return message


def _content(where: str, reader: FieldReader) -> str:
    """A string; null is empty; text parts are joined by newlines, as vLLM does for templates that
    take strings."""
    content = reader.raw("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(where, content, "a string, null, or a list of text parts")
    parts = cast("list[object]", content)
    return "\n".join(_text(f"{where}[{at}]", part) for at, part in enumerate(parts))


def _text(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        refuse(where, part, 'an object such as {"type": "text", "text": "..."}')
    fields = cast("Mapping[str, object]", part)
    kind, text = fields.get("type"), fields.get("text")
    if kind != "text":
        msg = f"{where}.type = {kind!r}: only text parts are supported"
        raise RequestError(msg, param=f"{where}.type", code="unsupported_parameter")
    if not isinstance(text, str):
        refuse(f"{where}.text", text, "a string")
    return text
