"""The frames that one reader has yet to get: the state at its arrival, then the batches since.

On the wire a frame is the length of what follows (4 bytes, big endian), the number of the batch on
this connection (8 bytes, big endian, from 0 without gaps), and the batch. A length of 0 is a sign
of life, and nothing follows it.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator

MAX_FRAME = 16 << 20  # bytes, number and batch
MAX_BATCH = MAX_FRAME - 8  # bytes
MAX_BEHIND_BYTES = 64 << 20
MAX_BEHIND_BATCHES = 10_000
SIGN_OF_LIFE = bytes(4)
_HEAD = struct.Struct(">IQ")


class ReaderQueue:
    """Frames for one reader. It is closed, and freed, if the reader is too slow."""

    def __init__(
        self, state: Iterator[bytes], wake: Callable[[], None], max_behind: int = MAX_BEHIND_BYTES
    ) -> None:
        self.closed = False
        self._state: Iterator[bytes] = state
        self._max_behind = max_behind  # bytes
        self._wake = wake  # is called when there is something new to take
        self._batches: deque[bytes] = deque()
        self._behind = 0  # bytes of them
        self._number = 0

    def put(self, payload: bytes) -> None:
        """Queue a batch; close the queue if the reader is too far behind."""
        if self.closed:
            return
        self._batches.append(payload)
        self._behind += len(payload)
        if self._behind > self._max_behind or len(self._batches) > MAX_BEHIND_BATCHES:
            self.close()
        self._wake()

    def next_frame(self) -> bytes | None:
        """Return the next frame, or None if there is none now."""
        payload = next(self._state, None)
        if payload is None and self._batches:
            payload = self._batches.popleft()
            self._behind -= len(payload)
        if payload is None:
            return None
        head = _HEAD.pack(8 + len(payload), self._number)
        self._number += 1
        return head + payload

    def close(self) -> None:
        """Close the queue: its writer then ends the connection."""
        self.closed = True
        self._state = iter(())
        self._batches.clear()
        self._behind = 0
        self._wake()
