"""JSON that is read only as far as it must be."""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")
# a JSON object: names decoded, values still the bytes that came
Fields: TypeAlias = dict[str, msgspec.Raw]
Pieces: TypeAlias = list[bytes | memoryview]  # of one text, in order
NULL: Final = msgspec.Raw(b"null")
TRUE: Final = msgspec.Raw(b"true")
FALSE: Final = msgspec.Raw(b"false")
# By type: there are as many as this package names, and making one costs ten times its use.
_DECODERS: Final[dict[object, msgspec.json.Decoder[Any]]] = {}
_EXACT: Final = 2.0**53  # below it each whole number is one float (IEEE 754, binary64)
_NUMBER: Final = b"-0123456789"  # begin one
LONG: Final = 8192  # bytes of a value; a shorter one is copied in less time than its piece takes


class NotJson(ValueError):
    """The bytes are not JSON; the message says where they stop to be."""


class OtherJson(NotJson):
    """The bytes are JSON of another type than the wanted one."""


def decode(data: bytes | msgspec.Raw, wanted: type[T]) -> T:
    """Decode JSON into a type; raises OtherJson (another type), or NotJson: it is none, or nested
    beyond reason.
    """
    decoder = _DECODERS.get(wanted)
    if decoder is None:
        decoder = _DECODERS[wanted] = msgspec.json.Decoder(wanted)
    try:
        found: T = decoder.decode(data)
    except msgspec.ValidationError as other:
        raise OtherJson(str(other)) from other
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise NotJson(str(exc)) from exc
    except RecursionError as deep:
        raise NotJson("JSON is nested too deeply") from deep
    return found


def maybe(data: bytes | msgspec.Raw, wanted: type[T]) -> T | None:
    """Decode JSON into a type, or return None: it is null, or of another type, or no JSON."""
    # a field that is not there: an error of msgspec's takes as long as a small object
    if data is NULL:
        return None
    decoder = _DECODERS.get(wanted)
    if decoder is None:
        decoder = _DECODERS[wanted] = msgspec.json.Decoder(wanted)
    try:
        found: T = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found


def decode_whole_floats(data: bytes | msgspec.Raw, wanted: type[T]) -> T:
    """Decode a JSON object into a type as :func:`decode` does, and take 5600.0 for 5600.

    Languages without integers write them so.
    """
    try:
        return decode(data, wanted)
    except OtherJson:
        return decode(
            encode({name: _with_integer(raw) for name, raw in decode(data, Fields).items()}), wanted
        )


def _with_integer(raw: msgspec.Raw) -> msgspec.Raw:
    value = bytes(raw)
    if value[:1] not in _NUMBER or (number := maybe(raw, float)) is None:
        return raw
    return msgspec.Raw(b"%d" % int(number)) if number.is_integer() and abs(number) < _EXACT else raw


def encode(fields: Fields) -> bytes:
    """Write an object; every value is written as it was read."""
    return msgspec.json.encode(fields)


def long_fields(fields: Fields) -> Sequence[str]:
    """Return the fields whose values are long."""
    return [name for name, raw in fields.items() if len(memoryview(raw)) > LONG]


def encode_in_pieces(fields: Fields, last: str, shared: Sequence[str] = ()) -> Pieces:
    """Write an object; if the value of the field ``last`` is long, it stands at the end, and is not
    copied.

    ``shared``: other fields whose values are long, and are not copied either: those that many
    bodies have in common.
    """
    if shared:
        return _encode_shared(fields, last, shared)
    value = fields.get(last)
    if value is None or len(memoryview(value)) <= LONG:
        return [msgspec.json.encode(fields)]
    return _encode_long(fields, last, value)


def _encode_long(fields: Fields, last: str, value: msgspec.Raw) -> Pieces:
    before = b",".join(
        [msgspec.json.encode({name: raw})[1:-1] for name, raw in fields.items() if name != last]
        + [b""]
    )
    return [b"{%b%b:" % (before, msgspec.json.encode(last)), memoryview(value), b"}"]


def _encode_shared(fields: Fields, last: str, shared: Sequence[str]) -> Pieces:
    """Write an object whose values are short, but for some; those stand behind the others, and
    ``last`` at the end.
    """
    long = [name for name in (*shared, last) if name in fields]
    short = {name: raw for name, raw in fields.items() if name not in long}
    begin = msgspec.json.encode(short)[:-1] + b"," if short else b"{"
    pieces = list[bytes | memoryview]()
    for name in long:
        pieces += [b"%b%b:" % (begin, msgspec.json.encode(name)), memoryview(fields[name])]
        begin = b","
    return [*pieces, b"}"]


def encode_text(value: str) -> bytes:
    """Write a string."""
    return msgspec.json.encode(value)


def text(value: str) -> msgspec.Raw:
    """Write a string, as a value of an object."""
    return msgspec.Raw(msgspec.json.encode(value))
