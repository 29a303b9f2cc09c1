"""Reads the requests of one connection, one after another: a head, then its body, as their bytes
come.

It buffers at most the beginning of a head, of a chunk's line or of trailers. The caller passes on
the bytes behind a request once that is served: nothing of the next one is read before.
"""

from typing import Final

from pdrelay_proxy.core.http.chunked_body import ChunkedBody
from pdrelay_proxy.core.http.framing import HEAD_MOST, Head, find_end, target_in
from pdrelay_proxy.core.http.repeated_head import RepeatedHead
from pdrelay_proxy.errors import BadFraming

# bytes of empty lines before a request (RFC 9112, 2.2: one line is to be ignored)
_BLANK_MOST: Final = 16
_HEAD_END: Final = b"\r\n\r\n"
_RETURN: Final = 13  # begins an empty line before a request


class RequestReader:
    """The reader of one connection."""

    __slots__ = (
        "_chunks",
        "_head",
        "_heads",
        "_remaining",
        "head_size",
        "in_body",
        "received",
        "rest",
    )

    def __init__(self) -> None:
        self._heads = RepeatedHead()
        self._head: bytearray | None = None  # the beginning of a head
        self.head_size = 0  # its bytes
        self._remaining = 0  # bytes of a body whose length was declared
        self._chunks: ChunkedBody | None = None
        self.in_body = False  # the next bytes are those of a body
        self.received = 0  # bytes of that body so far
        self.rest = b""  # the bytes behind the latest head or body

    @property
    def has_begun_head(self) -> bool:
        """Whether there is an incomplete head; empty lines before it are none (RFC 9112, 2.2)."""
        return self._head is not None and bool(self._head.strip(b"\r\n"))

    @property
    def is_chunked(self) -> bool:
        """Whether the present body is chunked."""
        return self._chunks is not None

    @property
    def line_size(self) -> int:
        """The buffered bytes of a chunked body."""
        return 0 if self._chunks is None else self._chunks.line_size

    def target(self, data: bytes = b"") -> bytes:
        """Return the target in the beginning of a head; ``data``: all there is of that."""
        return target_in(self._head or data)

    def drop_head(self) -> None:
        """Forget the beginning of a head."""
        self._head = None
        self.head_size = 0

    def read_head(self, data: bytes) -> Head | None:
        """Continue a head; return it once it is complete, with the bytes behind it in ``rest``.

        Raises:
            BadFraming, HeadTooLarge, UriTooLong, NotServed: it is refused.
        """
        if self._head is None and data[0] != _RETURN:  # nearly always the whole head comes at once
            end = data.find(_HEAD_END, 0, HEAD_MOST) + len(_HEAD_END)
            if end >= len(_HEAD_END):
                self.rest = data[end:]
                return self._heads.read(data[:end])
        known = self.head_size
        if self._head is None:
            received: bytes | bytearray = data
        else:
            self._head += data
            received = self._head
        start = 0
        while received.startswith(b"\r\n", start):
            start += 2
        if start > _BLANK_MOST:
            raise BadFraming(
                f"there are more than {_BLANK_MOST} bytes of empty lines before the request line"
            )
        end = find_end(received, start, read=max(0, known - start))
        if end < 0:
            if self._head is None:
                self._head = bytearray(data)
            self.head_size = len(self._head)
            self.rest = b""
            return None
        head = self._heads.read(bytes(received[start:end]))
        self.drop_head()
        self.rest = bytes(received[end:])
        return head

    def expect_body(self, length: int | None) -> None:
        """Expect a body of so many bytes; None: it is chunked."""
        self.in_body = True
        self.received = 0
        self._remaining = length or 0
        self._chunks = ChunkedBody() if length is None else None

    def read_body(self, data: bytes) -> bytes:
        """Return the part of a body that is in ``data``.

        Once the body is complete, ``in_body`` is False, and ``rest`` has the bytes behind it.

        Raises:
            BadFraming, HeadTooLarge: it is refused.
        """
        if self._chunks is None:
            piece = data[: self._remaining]
            self._remaining -= len(piece)
            self.in_body = self._remaining > 0
            self.rest = data[len(piece) :]
        else:
            piece = self._chunks.feed(data)
            self.in_body = not self._chunks.is_over
            self.rest = self._chunks.rest
            if not self.in_body:
                self._chunks = None
        self.received += len(piece)
        return piece
