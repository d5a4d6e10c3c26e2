"""Any struct of `core` to the protobuf message of the same name and back, field by field by name.

Built once per type from its annotations, so that the two descriptions cannot drift silently: a
field that one of them lacks fails when this module's user is imported. Presence carries None.

On the way out a struct becomes a dict, and so do those inside it: protobuf fills the whole tree
from that at once. A message as a field's value it would serialize and parse again, at each level.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from google.protobuf.message import Message

from control_plane.rpc import dovetail_pb2
from core.request import FinishReason

Convert = Callable[[Any], Any]
_SCALARS = (str, bytes, bool, int, float)

_NUMBER_BY_REASON: dict[FinishReason | None, int] = {
    None: dovetail_pb2.FINISH_REASON_UNSPECIFIED,
    **{
        reason: dovetail_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")
        for reason in FinishReason
    },
}
_REASON_BY_NUMBER = {number: reason for reason, number in _NUMBER_BY_REASON.items()}


def finish_reason_to_wire(reason: FinishReason | None) -> int:
    """Return the enum's number; None is UNSPECIFIED."""
    return _NUMBER_BY_REASON[reason]


def finish_reason_from_wire(number: int) -> FinishReason | None:
    """Return the reason.

    Raises:
        ValueError: a number that this protocol version does not know.
    """
    try:
        return _REASON_BY_NUMBER[number]
    except KeyError:
        msg = f"finish reason {number} is not one of this protocol version"
        raise ValueError(msg) from None


class _FieldCodec(NamedTuple):
    to_wire: Convert
    from_wire: Convert
    has_presence: bool = False


class StructCodec:
    """Encodes and decodes one struct type."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self.message: type[Message] = getattr(dovetail_pb2, struct.__name__)
        self._struct = struct
        self._fields = [(name, _field_codec(hint)) for name, hint in get_type_hints(struct).items()]
        self._converted = [
            (name, one.to_wire) for name, one in self._fields if one.to_wire is not _as_it_is
        ]
        on_wire = {field.name for field in self.message.DESCRIPTOR.fields}
        differing = on_wire ^ {name for name, _ in self._fields}
        if differing:
            msg = f"{struct.__name__} and its protobuf message differ in {sorted(differing)}"
            raise TypeError(msg)

    def encode(self, value: msgspec.Struct) -> dict[str, Any]:
        """Return the fields of the message, as its constructor takes them: None leaves one out."""
        fields = msgspec.structs.asdict(value)
        for name, to_wire in self._converted:
            field = fields[name]
            if field:
                fields[name] = to_wire(field)
        return fields

    def decode(self, message: Message) -> Any:
        """Return the struct.

        Raises:
            ValueError: an enum value that is not known here.
        """
        return self._struct(
            *[
                None
                if codec.has_presence and not message.HasField(name)
                else codec.from_wire(getattr(message, name))
                for name, codec in self._fields
            ]
        )


_codec_by_struct: dict[type[msgspec.Struct], StructCodec] = {}


def struct_codec(struct: type[msgspec.Struct]) -> StructCodec:
    """Return the codec of a struct type, built at the first call.

    Raises:
        TypeError: struct and protobuf message do not have the same fields.
    """
    codec = _codec_by_struct.get(struct)
    if codec is None:
        codec = _codec_by_struct[struct] = StructCodec(struct)
    return codec


def _as_it_is(value: Any) -> Any:
    return value


def _field_codec(hint: Any) -> _FieldCodec:
    hint = _without_new_type(hint)
    if hint == FinishReason | None:
        return _FieldCodec(finish_reason_to_wire, finish_reason_from_wire)
    if get_origin(hint) in (Union, types.UnionType):
        inner, none = get_args(hint)
        assert none is type(None), hint
        return _field_codec(inner)._replace(has_presence=True)
    if get_origin(hint) is tuple:
        return _repeated(_without_new_type(get_args(hint)[0]))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        nested = struct_codec(hint)
        return _FieldCodec(nested.encode, nested.decode)
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return _FieldCodec(_as_it_is, hint)  # its values are texts
    if hint in _SCALARS:
        return _FieldCodec(_as_it_is, _as_it_is)
    msg = f"no protobuf form for {hint}"
    raise TypeError(msg)


def _repeated(element: Any) -> _FieldCodec:
    if element in _SCALARS:
        return _FieldCodec(_as_it_is, tuple)
    if element == tuple[int, ...]:
        return _FieldCodec(_token_lists_to_wire, _token_lists_from_wire)
    if element == tuple[int, float]:
        return _FieldCodec(_biases_to_wire, _biases_from_wire)
    one = _field_codec(element)

    def to_wire(values: tuple[Any, ...]) -> list[Any]:
        return [one.to_wire(value) for value in values]

    def from_wire(values: Any) -> tuple[Any, ...]:
        return tuple([one.from_wire(value) for value in values])

    return _FieldCodec(to_wire, from_wire)


def _token_lists_to_wire(lists: tuple[tuple[int, ...], ...]) -> list[dict[str, Any]]:
    return [{"ids": ids} for ids in lists]


def _token_lists_from_wire(lists: list[dovetail_pb2.TokenIds]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(message.ids) for message in lists])


def _biases_to_wire(biases: tuple[tuple[int, float], ...]) -> list[dict[str, Any]]:
    return [{"token_id": token_id, "bias": bias} for token_id, bias in biases]


def _biases_from_wire(biases: list[dovetail_pb2.TokenBias]) -> tuple[tuple[int, float], ...]:
    return tuple([(message.token_id, message.bias) for message in biases])


def _without_new_type(hint: Any) -> Any:
    return getattr(hint, "__supertype__", hint)
