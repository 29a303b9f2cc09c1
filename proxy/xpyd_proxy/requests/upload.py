"""The body of a request while it comes: charged piece by piece, and kept in parts of some size."""

from typing import Final

from xpyd_proxy.requests.gate import Gate

_PART: Final = 64 * 1024  # bytes of a part; a body that grew in one piece would be moved again and again


class Upload:
    """One body."""

    __slots__ = ("_gate", "_held", "_parts", "_tail", "size")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._held = 0  # bytes of it that are charged
        self._parts: list[bytes] | None = None  # before the last pieces
        self._tail: bytes | bytearray = b""  # the last pieces
        self.size = 0  # bytes

    def add(self, piece: bytes, *, is_all: bool) -> None:
        """Keep a piece. ``is_all``: it is the whole body, which is charged where it is admitted, in a moment.

        Raises:
            RouterFull: the router holds as many bytes as it may.
        """
        self.size += len(piece)
        if is_all:
            self._tail = piece
            return
        self._gate.hold(len(piece))
        self._held += len(piece)
        if not isinstance(self._tail, bytearray):
            self._tail, self._parts = bytearray(), []
        self._tail += piece
        if len(self._tail) >= _PART and self._parts is not None:
            self._parts.append(bytes(self._tail))
            self._tail.clear()

    def whole(self) -> bytes:
        """Return all of it, once."""
        parts, tail = self._parts, bytes(self._tail)
        self._parts, self._tail = None, b""
        return b"".join([*parts, tail]) if parts else tail

    def free(self) -> None:
        """Give back what is charged, and let go of what is kept."""
        if self._held:
            self._gate.free(self._held)
            self._held = 0
        self._parts, self._tail = None, b""
