"""The body of a request while it comes: charged piece by piece, and kept in parts of some size."""

from typing import Final

from pdrelay_proxy.requests.gate import Gate

# bytes of a part; a body that grew in one piece would be moved again and again
_PART: Final = 64 * 1024


class Upload:
    """One body."""

    __slots__ = ("_gate", "_held", "_parts", "_size", "_tail")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._held = 0  # bytes of it that are charged
        self._parts: list[bytes] = []  # before the last pieces
        self._tail = bytearray()  # the last pieces
        self._size = 0  # bytes

    def __len__(self) -> int:
        """Return its bytes."""
        return self._size

    def add(self, piece: bytes) -> None:
        """Keep a piece; raises RouterFull: the router holds as many bytes as it may."""
        self._size += len(piece)
        self._gate.hold(len(piece))
        self._held += len(piece)
        self._tail += piece
        if len(self._tail) >= _PART:
            self._parts.append(bytes(self._tail))
            self._tail.clear()

    def whole(self) -> bytes:
        """Return all of it, once."""
        whole = b"".join([*self._parts, self._tail])
        self._parts = []
        self._tail = bytearray()
        return whole

    def free(self) -> None:
        """Give back what is charged, and let go of what is kept."""
        if self._held:
            self._gate.free(self._held)
            self._held = 0
        self._parts = []
        self._tail = bytearray()
