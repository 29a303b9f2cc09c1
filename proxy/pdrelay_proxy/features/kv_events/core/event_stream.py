"""Parses an engine's answer to ``GET /v1/pdrelay/kv_events``: frames, batches, events.

A frame is its length (4 bytes, big endian), the number of its batch on this connection (8 bytes,
from 0, without gaps) and one msgpack value. The length counts the bytes after it; 0 is a sign of
life.
"""

from typing import Final

import msgspec

from pdrelay_proxy.features.kv_events.errors import BadKvEvents
from pdrelay_proxy.features.kv_events.event_schemas import KvEvent, KvEventBatch, KvEventKind

PATH: Final = "/v1/pdrelay/kv_events"
FRAME_MOST: Final = 16 * 1024 * 1024  # bytes after the length
_LENGTH: Final = 4
_NUMBER: Final = 8
_BATCH: Final = msgspec.msgpack.Decoder(KvEventBatch)
_EVENT: Final[msgspec.msgpack.Decoder[KvEvent]] = msgspec.msgpack.Decoder(KvEvent)
_KIND: Final = msgspec.msgpack.Decoder(KvEventKind)
_STORED: Final = "BlockStored"
_KNOWN: Final = (_STORED, "BlockRemoved", "AllBlocksCleared")


class KvEventStream:
    """Reads frames from pieces of any size; it holds at most a frame and a piece."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._next = 0  # number of the batch that comes next

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of the frames that this piece completes.

        Raises:
            BadKvEvents: a frame has a wrong length, or a batch is missing; the stream is unusable.
        """
        rest = self._rest
        payloads = list[bytes]()
        at = 0
        rest += data
        while len(rest) - at >= _LENGTH:
            length = int.from_bytes(rest[at : at + _LENGTH], "big")
            if length > FRAME_MOST:
                raise BadKvEvents(f"a frame has {length} bytes, and {FRAME_MOST} is the most")
            if 0 < length < _NUMBER:
                raise BadKvEvents(f"a frame has {length} bytes, and its number alone has {_NUMBER}")
            begin = at + _LENGTH
            if len(rest) < begin + length:
                break
            if length:
                number = int.from_bytes(rest[begin : begin + _NUMBER], "big")
                if number != self._next:
                    raise BadKvEvents(f"batch {number} came where {self._next} should be")
                self._next += 1
                payloads.append(bytes(rest[begin + _NUMBER : begin + length]))
            at = begin + length
        del rest[:at]
        return payloads


def read_batch(payload: bytes) -> KvEventBatch:
    """Decode a batch without its events; raises BadKvEvents."""
    try:
        return _BATCH.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadKvEvents(f"a batch is not what vLLM publishes: {exc}") from exc


def read_event(raw: msgspec.Raw) -> KvEvent | None:
    """Decode an event; None: an unknown type, or stored blocks in an unknown form.

    Raises:
        BadKvEvents: unreadable, and it may have removed blocks.
    """
    try:
        return _EVENT.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        try:
            kind = _KIND.decode(raw).type
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as odd:
            raise BadKvEvents(f"an event is none: {odd}") from odd
        if kind == _STORED or kind not in _KNOWN:
            return None  # the index then misses some blocks, which is safe
        raise BadKvEvents(f"a {kind} is not what vLLM publishes: {exc}") from exc
