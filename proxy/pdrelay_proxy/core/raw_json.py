"""JSON that is decoded only as far as necessary."""

import re
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
# By type: this package names a few, and making a decoder costs ten times its use.
_DECODERS: Final[dict[object, msgspec.json.Decoder[Any]]] = {}
_EXACT: Final = 2.0**53  # below it every whole number is an exact float (IEEE 754, binary64)
_NUMBER: Final = b"-0123456789"  # begin one
_COLON: Final = 58
_SPACE: Final = 32  # the greatest byte that may stand between a name and its value
_SPACED_COLON: Final = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
LONG: Final = 8192  # bytes of a value; copying a shorter one is faster than keeping it as a piece


class NotJson(ValueError):
    """The bytes are not JSON; the message says where."""


class OtherJson(NotJson):
    """The bytes are JSON of another type than expected."""


def decode(data: bytes | msgspec.Raw, expected: type[T]) -> T:
    """Decode JSON into a type; raises OtherJson (another type), or NotJson (invalid, too deep)."""
    decoder = _DECODERS.get(expected)
    if decoder is None:
        decoder = _DECODERS[expected] = msgspec.json.Decoder(expected)
    try:
        value: T = decoder.decode(data)
    except msgspec.ValidationError as error:
        raise OtherJson(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise NotJson(str(exc)) from exc
    except RecursionError as recursion:
        raise NotJson("JSON is nested too deeply") from recursion
    return value


def maybe(data: bytes | msgspec.Raw, expected: type[T]) -> T | None:
    """Decode JSON into a type; None: it is null, of another type, or invalid."""
    # a missing field: an error of msgspec's takes as long as a small object
    if data is NULL:
        return None
    decoder = _DECODERS.get(expected)
    if decoder is None:
        decoder = _DECODERS[expected] = msgspec.json.Decoder(expected)
    try:
        value: T = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value


def value_at(text: bytes, name_end: int) -> int:
    """Return where the value of a member begins whose name, with its quotes, ends at ``name_end``;
    -1: it is no name, but a string.
    """
    at = name_end + 1
    if at < len(text) and text[name_end] == _COLON and text[at] > _SPACE:  # nearly always
        return at
    colon = _SPACED_COLON.match(text, name_end)
    return -1 if colon is None else colon.end()


def decode_whole_floats(data: bytes | msgspec.Raw, expected: type[T]) -> T:
    """Decode a JSON object into a type as :func:`decode` does, and accept 5600.0 for 5600.

    Languages without integers write them so.
    """
    try:
        return decode(data, expected)
    except OtherJson:
        return decode(
            encode({name: _with_integer(raw) for name, raw in decode(data, Fields).items()}),
            expected,
        )


def _with_integer(raw: msgspec.Raw) -> msgspec.Raw:
    value = bytes(raw)
    if value[:1] not in _NUMBER or (number := maybe(raw, float)) is None:
        return raw
    return msgspec.Raw(b"%d" % int(number)) if number.is_integer() and abs(number) < _EXACT else raw


def encode(fields: Fields) -> bytes:
    """Return an object; every value is written as it was read."""
    return msgspec.json.encode(fields)


def long_fields(fields: Fields) -> Sequence[str]:
    """Return the fields whose values are long."""
    return [name for name, raw in fields.items() if len(memoryview(raw)) > LONG]


def encode_in_pieces(fields: Fields, last: str, shared: Sequence[str] = ()) -> Pieces:
    """Return an object in pieces; a long value of the field ``last`` comes at the end, and is not
    copied.

    ``shared``: other fields with long values that many bodies have in common; these are not copied,
    either.
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
    """Return an object: short values first, then the shared ones, and ``last`` at the end."""
    long = [name for name in (*shared, last) if name in fields]
    short = {name: raw for name, raw in fields.items() if name not in long}
    begin = msgspec.json.encode(short)[:-1] + b"," if short else b"{"
    pieces = list[bytes | memoryview]()
    for name in long:
        pieces += [b"%b%b:" % (begin, msgspec.json.encode(name)), memoryview(fields[name])]
        begin = b","
    return [*pieces, b"}"]


def encode_text(value: str) -> bytes:
    """Return a string as JSON."""
    return msgspec.json.encode(value)


def to_raw(value: object) -> msgspec.Raw:
    """Return a value as one of an object's."""
    return msgspec.Raw(msgspec.json.encode(value))
