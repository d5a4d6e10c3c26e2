"""Strategies for any message of `core.messages`, from its annotations."""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from core.request import PromptLogprobs

UINT32 = st.integers(0, 2**32 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    bytes: st.binary(max_size=12),
    bool: st.booleans(),
    int: UINT32,
    float: st.floats(allow_nan=False),
}
FLOAT32 = st.lists(st.floats(allow_nan=False, width=32), max_size=4).map(tuple)
BY_FIELD = {
    "seed": st.integers(0, 2**64 - 1),
    "address": st.integers(0, 2**64 - 1),
    "priority": st.integers(-(2**63), 2**63 - 1),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for any annotation that messages use."""
    hint = getattr(hint, "__supertype__", hint)
    arguments = get_args(hint)
    if hint in BY_TYPE:
        return BY_TYPE[hint]
    if get_origin(hint) in (Union, types.UnionType):
        return st.none() | values(arguments[0])
    if get_origin(hint) is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=4).map(tuple)
    if get_origin(hint) is tuple:
        return st.tuples(*[values(argument) for argument in arguments])
    if issubclass(hint, msgspec.Struct):
        return structs(hint)
    return st.sampled_from(list(hint))


def structs(
    struct: type[msgspec.Struct], **given: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """Return a strategy for a struct, with fields as given; integers fill their wire type."""
    fields = {
        name: BY_FIELD[name] if name in BY_FIELD and hint is int else values(hint)
        for name, hint in get_type_hints(struct).items()
    }
    if struct is PromptLogprobs:
        fields |= {"chosen": FLOAT32, "top": FLOAT32}
    return st.builds(struct, **(fields | {name: given[name] for name in given if name in fields}))
