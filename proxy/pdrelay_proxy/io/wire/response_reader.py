"""Reads one response after the other from the bytes of a connection. httptools is imported here
alone.

llhttp, which httptools wraps, is strict about most of RFC 9112: two lengths, a length and chunks at
once, folded lines, bare line feeds, control characters. The rest is here: the transfer coding, the
version, statuses below 100, interim responses with a body, limits of a head and a trailer, and how
a response without a length ends.
"""

from collections.abc import Callable
from typing import Final, NoReturn

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from pdrelay_proxy.errors import forget_frames
from pdrelay_proxy.io.wire.simple_response import SimpleResponses, parse_chunks

HEAD_MOST: Final = 64 * 1024  # bytes of a head, and of anything else between two pieces of a body
_BODYLESS: Final = frozenset({204, 304})
_END: Final = b"0\r\n\r\n"  # of a body in chunks


class UnclearResponse(Exception):
    """The router does not accept this response; the message says why."""


class ResponseReader:
    """The parser of one connection, and the head of the response that it reads.

    Its ``on_`` methods are httptools' callbacks.
    """

    __deletable__ = ("_parser",)  # mypyc wants to know

    def __init__(self, simple_responses: SimpleResponses) -> None:
        """``simple_responses``: the engine's usual heads."""
        self._parser = HttpResponseParser(self)
        self._simple_responses = simple_responses
        self.is_tls = False
        self.in_response = False  # some of the response has come
        self.pieces: list[bytes] = []  # of the body, not yet passed on
        self.unbounded_bytes = 0  # bytes since the last piece of a body or the last request
        self.between = False  # the next byte is the first of a chunk
        self._tail: bytes = b""  # the last bytes that the parser has had of a response in chunks
        self.forget_head()

    def feed(self, data: bytes) -> Exception | None:
        """Read some bytes; return the error in them, if any."""
        self.unbounded_bytes += len(data)
        head_end = 0 if self.in_response else self._read_stream_head(data)
        self.in_response = True
        if self.between:
            end = parse_chunks(data, head_end, self.pieces)
            if end > head_end:
                self.unbounded_bytes = 0
            if end == len(data):
                return None
            if self._head and data[end:] == _END:
                self.done = self.keeps = True
                return None
            data = data[end:] if end else data
            self._parse_head()
        fault = self._parse(data)
        # What ends so is no half of a size: a whole one would have begun a chunk.
        self.between = self.between and fault is None and data.endswith(b"\r\n")
        return fault

    def _read_stream_head(self, data: bytes) -> int:
        """Read the head of a usual stream without the parser, which gets it when it is needed;
        return its length.
        """
        head = self._simple_responses.match_stream(data)
        if head:
            self._head = head
            self.content_type = self._simple_responses.stream_type
            self.status = 200
            self.headed = True
            self.between = True
            self.unbounded_bytes = 0
        return len(head)

    def _parse_head(self) -> None:
        """Feed the parser the head that it has not had, so that it waits for a chunk."""
        head = self._head
        self._head = b""
        if head:
            loose = self.unbounded_bytes
            self.unbounded_bytes = 0
            self.headed = False
            self.content_type = b""
            self._parser.feed_data(head)
            self.unbounded_bytes = loose

    def _parse(self, data: bytes) -> Exception | None:
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            return UnclearResponse("it changes the protocol")
        except HttpParserError as exc:
            cause = exc.__context__
            fault = cause if isinstance(cause, UnclearResponse) else exc
            # its frames refer to the caller, which keeps the fault: a reference cycle
            return forget_frames(fault)
        if self.unbounded_bytes > HEAD_MOST and not self.done:
            return UnclearResponse(f"a head of more than {HEAD_MOST} bytes")
        if self._codings:
            self._check_end(data)
        return None

    def _check_end(self, data: bytes) -> None:
        """Do not keep a connection on which an empty line follows a body in chunks: llhttp skips
        it.

        Nothing may follow a response before the next request; bytes that come a moment later close
        the connection.
        """
        tail = self._tail = data[-5:] if len(data) >= 5 else (self._tail + data)[-5:]
        if self.done and (tail[-4:] != b"\r\n\r\n" or tail[:-4] in (b"\r", b"\n")):
            self.keeps = False

    def close(self) -> None:
        """Let go of the parser: the two refer to each other."""
        if hasattr(self, "_parser"):
            del self._parser

    # For the parser

    def forget_head(self) -> None:
        """Forget the response that is over."""
        self.in_response = False
        self.status = 0
        self.content_type = self.load = b""
        self._codings: list[bytes] = []
        self._has_length = False
        self._head_size = 0
        self._head = b""  # a stream's head that the parser has not had
        self._tail = b""
        self.headed = self.done = self.keeps = self.until_eof = self.between = False

    def on_message_begin(self) -> None:
        """Refuse a second answer to one request."""
        if self.done:
            self._refuse("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header that matters here, or limit a trailer."""
        if self.unbounded_bytes > HEAD_MOST:  # what came with it may be body
            self._head_size += len(name) + len(value)
            if self._head_size > HEAD_MOST:
                self._refuse(f"a head of more than {HEAD_MOST} bytes")
        if name in _IGNORED:
            return
        parse_value = _READ.get(name.lower())
        if parse_value is None:
            if len(_IGNORED) < _MAX_IGNORED:
                _IGNORED.add(name)
        elif not self.headed:
            parse_value(self, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        """Decide how the answer ends (RFC 9112, 6.3); refuse it if that is not clear."""
        status = self._parser.get_status_code()
        version = self._parser.get_http_version()
        if status == 101 or not 100 <= status < 600:  # RFC 9110, 15
            self._refuse(f"status {status:03}")
        if version not in ("1.1", "1.0"):
            self._refuse(f"version {version}")
        framed = self._has_length or bool(self._codings)
        if status < 200:
            if framed:
                self._refuse(f"status {status} with a body")
            self.status = status
            return
        if self._codings and (
            version == "1.0" or [coding.lower() for coding in self._codings] != [b"chunked"]
        ):
            self._refuse("a transfer coding other than chunked")
        self.status = status
        self.headed = True
        self.unbounded_bytes = 0
        self.until_eof = not framed and status not in _BODYLESS
        if self.until_eof and self.is_tls:  # a man in the middle can end the connection
            self._refuse("an answer without a length over TLS, whose end cannot be told from a cut")

    def on_body(self, piece: bytes) -> None:
        """Keep a piece until all of the received bytes are parsed."""
        self.unbounded_bytes = 0
        self.pieces.append(piece)

    def on_chunk_header(self) -> None:
        """Note that the parser has begun a chunk."""
        self.between = False

    def on_chunk_complete(self) -> None:
        """Note that the parser has read a chunk to its end."""
        self.between = True

    def on_message_complete(self) -> None:
        """Note the end of an answer, or of an interim one (1xx), which is ignored."""
        if not self.headed:
            self.forget_head()
            self.in_response = True
            return
        self.done = True
        stray = self.status in _BODYLESS and (
            bool(self._codings) or (self.status == 204 and self._has_length)
        )
        self.keeps = self._parser.should_keep_alive() and not stray

    def read_content_type(self, value: bytes) -> None:
        """Join several, as it is not clear which one counts."""
        self.content_type = self.content_type + b", " + value if self.content_type else value

    def read_load(self, value: bytes) -> None:
        """Keep the engine's load report."""
        self.load = self.load + b", " + value if self.load else value

    def read_length(self, _value: bytes) -> None:
        """Note a length: the parser has read it, and refuses a second one."""
        self._has_length = True

    def read_coding(self, value: bytes) -> None:
        """Keep a transfer coding; only ``chunked`` is accepted."""
        self._codings.append(value)

    def read_content_coding(self, value: bytes) -> None:
        """Refuse a compressed body: the router would read it as plain."""
        if value.lower() not in (b"", b"identity"):
            self._refuse("a content coding, and none was asked for")

    def _refuse(self, why: str) -> NoReturn:
        raise UnclearResponse(why)


# names of headers that do not matter here, as engines write them
_IGNORED: Final[set[bytes]] = set()
_MAX_IGNORED: Final = 64
_READ: Final[dict[bytes, Callable[[ResponseReader, bytes], None]]] = {
    b"content-type": ResponseReader.read_content_type,
    b"endpoint-load-metrics": ResponseReader.read_load,
    b"content-length": ResponseReader.read_length,
    b"transfer-encoding": ResponseReader.read_coding,
    b"content-encoding": ResponseReader.read_content_coding,
}
