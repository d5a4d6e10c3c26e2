"""Reads one JSON body field by field; each refusal names the field, the value and what is right.

null stands for "not given", as in the official clients. What nobody has read at the end is unknown.
Bodies have few of the fields that there are, so tables of readers are looked up by what is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NoReturn, cast

import msgspec

from core.errors import RequestError

_MAX_SHOWN = 80


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return a request's JSON object.

    Raises:
        RequestError: 400; no JSON, no UTF-8, nested too deeply, or no object.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"the body must be JSON in UTF-8: {error}"
        raise RequestError(msg, code="invalid_json") from None
    except RecursionError:
        msg = "the body is nested too deeply"
        raise RequestError(msg, code="invalid_json") from None
    if not isinstance(body, dict):
        msg = f"the body must be a JSON object, not {_kind(body)}"
        raise RequestError(msg, code="invalid_json")
    return cast("dict[str, Any]", body)


def refuse(name: str, value: object, right: str, *, code: str = "invalid_value") -> NoReturn:
    """Raise the 400 that names a field, its value and what would be right."""
    msg = f"{name} = {shown(value)}: must be {right}"
    raise RequestError(msg, param=name, code=code)


def refuse_unsupported(name: str, value: object) -> NoReturn:
    """Raise the 400 for a known field with a value that would change the answer."""
    msg = f"{name} = {shown(value)}: is not supported; leave it out"
    raise RequestError(msg, param=name, code="unsupported_parameter")


def shown(value: object) -> str:
    """Return a value as JSON, cut to what fits in a message."""
    text = msgspec.json.encode(value).decode("utf-8", "replace")
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


class FieldReader:
    """One body (or one object inside it), read once.

    Args:
        prefix: where the object stands in the body (`stream_options.`).
    """

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self._unread = dict(body)
        self._prefix = prefix

    def raw(self, name: str) -> Any:
        """Return a field as JSON has it; None where it is missing, null, or was read before."""
        return self._unread.pop(name, None)

    def read_given(self, readers: Mapping[str, ReadField]) -> dict[str, Any]:
        """Return the fields of a table that are there, each as its reader has it."""
        names = [name for name in self._unread if name in readers]
        return {name: readers[name](self, name) for name in names}

    def number(
        self, name: str, default: float, low: float, high: float, *, above_low: bool = False
    ) -> float:
        """Return a number from `low` (or above it) to `high`, both finite or inf."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(self._prefix + name, value, f"a number {_between(low, high, above_low)}")
        fits = (value > low if above_low else value >= low) and value <= high
        if not fits or not math.isfinite(value):
            refuse(self._prefix + name, value, _between(low, high, above_low))
        return float(value)

    def integer(self, name: str, low: float, high: float = math.inf) -> int | None:
        """Return a whole number from `low` to `high`, None where none was given."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(self._prefix + name, value, f"a whole number {_between(low, high)}")
        if not low <= value <= high:
            refuse(self._prefix + name, value, _between(low, high))
        return value

    def boolean(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            refuse(self._prefix + name, value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """Return a string, None where none was given."""
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            refuse(self._prefix + name, value, "a string")
        return value

    def texts(self, name: str, *, max_items: int) -> tuple[str, ...]:
        """Return a string or a list of strings, none of them empty."""
        value = self.raw(name)
        if value is None:
            return ()
        if isinstance(value, str):
            value = [value]
        items = cast("list[object]", value)
        if not isinstance(value, list):
            refuse(self._prefix + name, items, "a string or a list of strings")
        texts = tuple(item for item in items if isinstance(item, str))
        if len(texts) < len(items):
            refuse(self._prefix + name, items, "a string or a list of strings")
        if "" in texts:
            refuse(self._prefix + name, items, "without empty strings")
        if len(texts) > max_items:
            refuse(self._prefix + name, items, f"at most {max_items} strings")
        return texts

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...] | None:
        """Return a list of token ids of the vocabulary, None where none was given."""
        value = self.raw(name)
        if value is None:
            return None
        if not is_token_ids(value):
            refuse(self._prefix + name, value, "a list of token ids")
        check_token_ids(self._prefix + name, value, vocab_size)
        return tuple(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object; empty where none was given."""
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            refuse(self._prefix + name, value, "an object")
        return cast("dict[str, Any]", value)

    def accept(self, names: AbstractSet[str]) -> None:
        """Know fields that cannot change the answer."""
        for name in [name for name in self._unread if name in names]:
            del self._unread[name]

    def refuse_effect(self, harmless: Mapping[str, Sequence[object]]) -> None:
        """Refuse fields that hold anything but null, empty or a harmless value.

        Raises:
            RequestError: 400, `unsupported_parameter`.
        """
        for name in [name for name in self._unread if name in harmless]:
            value = self._unread.pop(name)
            is_empty = value is None or value in ("", [], {})
            if not is_empty and not any(_same(value, one) for one in harmless[name]):
                refuse_unsupported(self._prefix + name, value)

    def unknown(self) -> list[str]:
        """Return the names of the fields that nobody has read."""
        return [self._prefix + name for name in self._unread]


ReadField = Callable[[FieldReader, str], Any]
"""Reads the field of this name."""


def is_token_ids(value: object) -> bool:
    """Whether a JSON value is a list of whole numbers."""
    if not isinstance(value, list):
        return False
    return all(type(item) is int for item in cast("list[object]", value))


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary with 400."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(one for one in token_ids if not 0 <= one < vocab_size)
        refuse(name, wrong, f"token ids between 0 and {vocab_size - 1}")


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _between(low: float, high: float, above_low: bool = False) -> str:
    least = f"greater than {_plain(low)}" if above_low else f"at least {_plain(low)}"
    if high == math.inf:
        return least
    if above_low:
        return f"{least} and at most {_plain(high)}"
    return f"between {_plain(low)} and {_plain(high)}"


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _kind(value: object) -> str:
    names: dict[type, str] = {
        list: "an array",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")
