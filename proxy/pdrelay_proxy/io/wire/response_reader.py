"""Reads one response after the other from the bytes of a connection. httptools and its exceptions
stop at this file.

llhttp, which httptools wraps, is strict about most of what a response may look like: two lengths, a
length and chunks at once, folded lines, bare line feeds, control characters. The rest is here: the
transfer coding, the version, statuses below 100, interim responses with a body, how long a head or
a trailer may be, and how a response without a length ends.
"""

from collections.abc import Callable
from typing import Final, NoReturn

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from pdrelay_proxy.io.wire.simple_response import SimpleResponses, parse_chunks

HEAD_MOST: Final = 64 * 1024  # bytes of a head, and of anything else between two pieces of a body
_BODYLESS: Final = frozenset({204, 304})
_END: Final = b"0\r\n\r\n"  # of a body in chunks


class UnclearResponse(Exception):
    """The response is not one that the router follows; the message says why."""


class ResponseReader:
    """The parser of one connection, and the head of the response that it reads.

    Its ``on_`` methods are httptools'.
    """

    __deletable__ = ("_parser",)  # mypyc wants to know

    def __init__(self, usual: SimpleResponses) -> None:
        """``usual``: what the engine's usual answers begin with."""
        self._parser = HttpResponseParser(self)
        self._usual = usual
        self.is_tls = False
        self.in_response = False  # the parser has had some of the response
        self.pieces: list[bytes] = []  # of the body, not yet taken
        self.loose = 0  # bytes since the last piece of a body, or since the last request
        self.between = False  # what comes is the first byte of a chunk
        self._tail: bytes = b""  # the last bytes that the parser has had of a response in chunks
        self.forget_head()

    def feed(self, data: bytes) -> Exception | None:
        """Read some bytes; return what is wrong with them."""
        self.loose += len(data)
        at = 0 if self.in_response else self._read_stream_head(data)
        self.in_response = True
        if self.between:
            behind = parse_chunks(data, at, self.pieces)
            if behind > at:
                self.loose = 0
            if behind == len(data):
                return None
            if self._head and data[behind:] == _END:
                self.done = self.keeps = True
                return None
            data = data[behind:] if behind else data
            self._parse_head()
        fault = self._parse(data)
        # What ends so is no half of a size: a whole one would have begun a chunk.
        self.between = self.between and fault is None and data.endswith(b"\r\n")
        return fault

    def _read_stream_head(self, data: bytes) -> int:
        """Read the head of a usual stream without the parser, which gets it when it is needed;
        return where it ends.
        """
        head = self._usual.match_stream(data)
        if head:
            self._head = head
            self.content_type = self._usual.stream_type
            self.status = 200
            self.headed = True
            self.between = True
            self.loose = 0
        return len(head)

    def _parse_head(self) -> None:
        """Have the parser read the head that it has not had, and so wait for a chunk."""
        head = self._head
        self._head = b""
        if head:
            loose = self.loose
            self.loose = 0
            self.headed = False
            self.content_type = b""
            self._parser.feed_data(head)
            self.loose = loose

    def _parse(self, data: bytes) -> Exception | None:
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            return UnclearResponse("it changes the protocol")
        except HttpParserError as exc:
            mine = exc.__context__
            fault = mine if isinstance(mine, UnclearResponse) else exc
            # it leads to our caller, who holds the fault: a circle
            return fault.with_traceback(None)
        if self.loose > HEAD_MOST and not self.done:
            return UnclearResponse(f"a head of more than {HEAD_MOST} bytes")
        if self._codings:
            self._look_behind_end(data)
        return None

    def _look_behind_end(self, data: bytes) -> None:
        """Do not keep a connection on which an empty line has come behind a body in chunks: llhttp
        skips it.

        Nothing may follow a response that was not asked for, and what comes a moment later closes
        the connection.
        """
        tail = self._tail = data[-5:] if len(data) >= 5 else (self._tail + data)[-5:]
        if self.done and (tail[-4:] != b"\r\n\r\n" or tail[:-4] in (b"\r", b"\n")):
            self.keeps = False

    def close(self) -> None:
        """Let go of the parser: the two hold each other, and would wait for the garbage
        collector.
        """
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
        self._head = b""  # what the parser has not had, of a stream in good chunks
        self._tail = b""
        self.headed = self.done = self.keeps = self.until_eof = self.between = False

    def on_message_begin(self) -> None:
        """Refuse a second answer to one request."""
        if self.done:
            self._refuse("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take what matters from a header, or bound a trailer."""
        if self.loose > HEAD_MOST:  # what came with it may be body
            self._head_size += len(name) + len(value)
            if self._head_size > HEAD_MOST:
                self._refuse(f"a head of more than {HEAD_MOST} bytes")
        if name in _IGNORED:
            return
        read = _READ.get(name.lower())
        if read is None:
            if len(_IGNORED) < _IGNORED_MOST:
                _IGNORED.add(name)
        elif not self.headed:
            read(self, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        """Decide how the answer ends; refuse it where that is not clear."""
        status = self._parser.get_status_code()
        version = self._parser.get_http_version()
        if status == 101 or not 100 <= status < 1000:
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
            version == "1.0" or [one.lower() for one in self._codings] != [b"chunked"]
        ):
            self._refuse("a transfer coding other than chunked")
        self.status = status
        self.headed = True
        self.loose = 0
        self.until_eof = not framed and status not in _BODYLESS
        if self.until_eof and self.is_tls:  # whoever sits in between can end the connection
            self._refuse("an answer without a length over TLS, whose end cannot be told from a cut")

    def on_body(self, piece: bytes) -> None:
        """Keep a piece until all that came with it is parsed."""
        self.loose = 0
        self.pieces.append(piece)

    def on_chunk_header(self) -> None:
        """Note that the parser has begun a chunk."""
        self.between = False

    def on_chunk_complete(self) -> None:
        """Note that it is behind one."""
        self.between = True

    def on_message_complete(self) -> None:
        """Note the end of an answer, or of an interim one, which nobody needs."""
        if not self.headed:
            self.forget_head()
            self.in_response = True
            return
        self.done = True
        stray = self.status in _BODYLESS and (
            bool(self._codings) or (self.status == 204 and self._has_length)
        )
        self.keeps = self._parser.should_keep_alive() and not stray

    def take_content_type(self, value: bytes) -> None:
        """Several are joined: nobody can tell which one is meant."""
        self.content_type = self.content_type + b", " + value if self.content_type else value

    def take_load(self, value: bytes) -> None:
        """The engine says how busy it is."""
        self.load = self.load + b", " + value if self.load else value

    def take_length(self, _value: bytes) -> None:
        """The parser has read the length, and refuses a second one."""
        self._has_length = True

    def take_coding(self, value: bytes) -> None:
        """The parser follows it only if it is what we expect."""
        self._codings.append(value)

    def take_compression(self, value: bytes) -> None:
        """Whoever reads the answer would take it for what it says."""
        if value.lower() not in (b"", b"identity"):
            self._refuse("a content coding, and none was asked for")

    def _refuse(self, why: str) -> NoReturn:
        raise UnclearResponse(why)


# names of headers that say nothing to us, as engines write them
_IGNORED: Final[set[bytes]] = set()
_IGNORED_MOST: Final = 64
_READ: Final[dict[bytes, Callable[[ResponseReader, bytes], None]]] = {
    b"content-type": ResponseReader.take_content_type,
    b"endpoint-load-metrics": ResponseReader.take_load,
    b"content-length": ResponseReader.take_length,
    b"transfer-encoding": ResponseReader.take_coding,
    b"content-encoding": ResponseReader.take_compression,
}
