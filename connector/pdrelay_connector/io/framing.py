"""Messages on a byte stream: a 4-byte little-endian length, then that many bytes of msgpack."""

import struct
from collections.abc import Iterator

from pdrelay_connector.errors import ProtocolViolation

_LENGTH = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    """Return a message as it travels."""
    return _LENGTH.pack(len(data)) + data


class Deframer:
    """Cuts a byte stream into messages, and refuses those longer than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete now.

        Raises :exc:`~pdrelay_connector.errors.ProtocolViolation` before anything too long is
        buffered.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.limit:
                raise ProtocolViolation(
                    f"a message of {length} bytes; at most {self.limit} are allowed"
                )
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield message
