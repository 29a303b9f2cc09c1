"""Server-sent events, as far as a relay must understand them (WHATWG HTML, 9.2).

Bytes are searched with ``find``: ``in`` first tries its operand as a number, and raises and drops
an error.
"""

import re
from typing import Final

from pdrelay_proxy.core.protocol.given_up import (
    COMPLETED,
    MESSAGE_STOP,
    given_up,
    was_given_up,
)
from pdrelay_proxy.core.protocol.response_filter import clean_lines, may_name_params
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.core.schemas import ErrorEvent
from pdrelay_proxy.errors import AnswerRefused

_DONE: Final = re.compile(rb"[\r\n]data: ?\[DONE\]\s*\Z")  # at the end of a stream
_USUAL_END: Final = b"\ndata: [DONE]\n\n"  # the same, as vLLM writes it
_DONE_MARK: Final = b"[DONE]"
_ERROR: Final = b'data: {"error":'
_ERRORS: Final = (_ERROR, b'data:{"error":')
_ERROR_OBJECT: Final = b'{"error":'
_BOM: Final = b"\xef\xbb\xbf"  # may stand before a stream
_COMMENT: Final = b":"
_COLON: Final = 58  # begins a comment
_DATA: Final = b"data:"
_EVENT: Final = b"event:"
_BACKSLASH: Final = 92
_RETURN: Final = 13  # a carriage return, which may end a line too
_NEWLINE: Final = 10
_D: Final = 100  # begins ``data``, and no ``event``
_E: Final = 101  # begins ``error``
# the rarest letter of ``event``; a search for one byte by its number costs a tenth of several
_V: Final = 118
_NAME_AT: Final = _ERROR.index(b"e")
_NARROW_NAME_AT: Final = _ERRORS[1].index(b"e")  # without the space behind the colon
_BREAK: Final = re.compile(rb"[\r\n]")
# bytes of a line; the last event of /v1/responses has a whole answer in it
LINE_MOST: Final = 16 * 1024 * 1024
_END_MOST: Final = 32  # bytes of passed lines that show a stream's end
# bytes of passed lines that are kept where short ones follow: a long event before its short end
# tells why it ends
_SHORT_MOST: Final = 64 * 1024
# The events of /v1/responses before the engine has started: they do not show that it will serve
# the request.
_PREAMBLE: Final = frozenset({b"response.created", b"response.queued", b"response.in_progress"})
# Other APIs than the first two name their events, and end with one of these in place of a [DONE].
_LAST: Final = frozenset(
    {MESSAGE_STOP, b"error", COMPLETED, b"response.failed", b"response.incomplete"}
)
_WHOLE: Final = frozenset({MESSAGE_STOP, COMPLETED})


def error_status(data: bytes) -> int | None:
    """Return the HTTP status of an error event (500 if it names none); None: it is another."""
    # a name may be in escapes
    if data.find(b'"error"') < 0 and (_BACKSLASH not in data or data.find(b"\\u") < 0):
        return None
    try:
        event = decode(data, ErrorEvent)
    except NotJson:
        return None
    if event.error is None:
        return None
    code = event.error.code
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def line_too_long(engine: str) -> AnswerRefused:
    """Return the error for a stream with a line of more than ``LINE_MOST`` bytes."""
    return AnswerRefused(f"{engine} sent a line of more than {LINE_MOST} bytes in its stream")


def first_data(piece: bytes) -> bytes | None:
    """Return the data of a first event that begins with its line; None: see ``Beginning``."""
    end = piece.find(b"\n") if piece[: len(_DATA)] == _DATA else -1
    if end < 0 or (_RETURN in piece and piece.find(b"\r", 0, end) >= 0):
        return None
    return piece[len(_DATA) : end].strip()


class Beginning:
    """A stream up to its first event, however small its pieces are.

    Comments (keep-alives) are no events, and the announcements of /v1/responses show nothing about
    the request yet.
    """

    __slots__ = ("_at", "_name", "_searched", "received")

    def __init__(self) -> None:
        self.received = bytearray()
        self._at = 0  # where the incomplete line begins
        self._searched = 0  # how far the incomplete line was searched for its end
        self._name = b""  # of the present event

    @property
    def line_size(self) -> int:
        """The bytes of the incomplete line."""
        return len(self.received) - self._at

    def feed(self, piece: bytes) -> bytes | None:
        """Read a piece; return the data of the first event, once its line is complete."""
        text = self.received
        text += piece
        if self._at == 0 and text.startswith(_BOM):
            del text[: len(_BOM)]
            self._searched = 0
        while (end := _end_of_line(text, self._searched)) >= 0:
            line = bytes(text[self._at : end])
            self._at = self._searched = end + 1
            if line.startswith(_EVENT):
                self._name = line[len(_EVENT) :].strip()
            elif line.startswith(_DATA):
                if self._name not in _PREAMBLE:
                    return line[len(_DATA) :].strip()
                self._name = b""
        self._searched = len(text)
        return None


def _end_of_line(text: bytearray, offset: int) -> int:
    """Return the place of the next line break, or -1."""
    match = _BREAK.search(text, offset)
    return -1 if match is None else match.start()


class WholeLines:
    """Passes a stream in whole lines, and notices whether it came to its proper end.

    vLLM writes whole events, so nearly always everything passes at once. But if an engine dies in
    the middle of a line, that line has not been sent on, and an error event can follow it properly.
    Passed lines have no ``kv_transfer_params``. Lines that end with carriage returns alone pass
    with line feeds.
    """

    __slots__ = (
        "_before",
        "_engine",
        "_is_ending",
        "_last",
        "_name",
        "_rest",
        "_returned",
        "_size",
        "erred",
    )

    def __init__(self, engine: str) -> None:
        self.erred = False  # the engine reported a failure
        self._engine = engine  # its id, for errors
        self._rest: list[bytes] = []  # pieces of an incomplete line
        # the last line ended with a carriage return, whose line feed may follow
        self._returned = False
        self._size = 0  # bytes of those pieces
        # the end of the passed lines: the latest that came at once, and those before them
        self._last = b"\n"
        self._before = b""
        self._name = b""  # of the last event that has one
        self._is_ending = False  # it says that an answer is whole

    def feed(self, chunk: bytes) -> bytes:
        """Read a chunk; return the lines that may pass.

        Raises:
            AnswerRefused: a line is too long, or has parameters that cannot be removed.
            EngineError: the stream ends with an answer that the engine has given up.
        """
        if chunk and chunk[-1] == _NEWLINE and not self._rest and _RETURN not in chunk:
            # nearly always
            passing = chunk
        else:
            passing = self._whole_lines(chunk)
            if not passing:
                return b""
        if may_name_params(passing):
            passing = clean_lines(self._engine, _with_line_feeds(passing))
        self._note(passing)
        return passing

    def _whole_lines(self, chunk: bytes) -> bytes:
        """Return the complete lines, and keep the rest."""
        if self._returned:
            self._returned = False
            chunk = chunk.removeprefix(b"\n")
        if chunk.count(b"\r") > chunk.count(b"\r\n"):
            self._returned = chunk[-1] == _RETURN
            chunk = _with_line_feeds(chunk)
        end = chunk.rfind(b"\n") + 1
        rest = chunk[end:]
        if end == 0:
            self._hold(rest)
            return b""
        passing = b"".join([*self._rest, chunk[:end]])
        self._rest = []
        self._size = 0
        if rest or self._returned:  # the next chunk may begin with its line feed
            self._hold(rest)
        return passing

    def _hold(self, piece: bytes) -> None:
        """Keep a piece of an incomplete line."""
        self._size += len(piece)
        if self._size > LINE_MOST:
            self._rest = []
            self._size = 0
            raise line_too_long(self._engine)
        self._rest.append(piece)

    def finish(self) -> tuple[bytes, bool]:
        """End the stream: return the rest of it, and whether it was complete."""
        if not self._rest and self._last[-len(_USUAL_END) :] == _USUAL_END:
            return b"", True
        rest = b"".join(self._rest)
        data = b"" if rest.startswith(_COMMENT) else rest
        is_done = _is_done(self._last[-_END_MOST:] + data)
        complete = is_done or (self._name in _LAST and not data and self._has_data())
        return (rest if complete else b""), complete

    def _has_data(self) -> bool:
        """Tell whether the last event has data: it does not end with the line of its name."""
        lines = self._last.rstrip(b"\r\n")
        return not lines.startswith(_EVENT, lines.rfind(b"\n") + 1)

    def _note(self, passing: bytes) -> None:
        is_token = passing[0] == _D and _NEWLINE not in passing[:-2] and _RETURN not in passing
        if is_token:
            may_be_error = len(passing) > _NAME_AT and (
                passing[_NAME_AT] == _E or passing[_NARROW_NAME_AT] == _E
            )
            if may_be_error and passing.startswith(_ERRORS):
                self.erred = True
        else:
            passing = self._note_events(passing)
            if not passing:
                return
        if len(passing) >= _END_MOST:
            self._before = self._last
            self._last = passing
            if is_token and not self._is_ending:
                return
        else:
            self._last = (self._last + passing)[-_SHORT_MOST:]
        if (
            (self._is_ending or _is_done(self._last[-_END_MOST:]))
            and not self.erred
            and was_given_up(self._before + self._last, self._name)
        ):
            self._last = self._name = b""  # its end has not passed
            raise given_up(self._engine)

    def _note_events(self, passing: bytes) -> bytes:
        """Take in lines that are not one event's data; return them without last comments."""
        if (
            _V in passing
            and passing.find(_EVENT) >= 0
            and ((at := passing.rfind(b"\n" + _EVENT) + 1) or passing.startswith(_EVENT))
        ):
            self._name = passing[at + len(_EVENT) :].partition(b"\n")[0].strip()
            self._is_ending = self._name in _WHOLE
        if self._name == b"error" or (passing.find(_ERROR_OBJECT) >= 0 and _has_error(passing)):
            self.erred = True
        is_end = passing[-len(_USUAL_END) :] == _USUAL_END
        may_have_comments = passing[0] == _COLON or passing.find(b"\n:") >= 0 or _RETURN in passing
        return _before_comments(passing) if may_have_comments and not is_end else passing


def _is_done(end: bytes) -> bool:
    """Return whether lines that end so are the end of a stream."""
    return end.find(_DONE_MARK) >= 0 and _DONE.search(end) is not None


def _has_error(lines: bytes) -> bool:
    return lines.find(_ERRORS[0]) >= 0 or lines.find(_ERRORS[1]) >= 0


def _with_line_feeds(lines: bytes) -> bytes:
    """Return the lines, each ended by a line feed alone."""
    return lines.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if _RETURN in lines else lines


def _before_comments(lines: bytes) -> bytes:
    """Return lines without comments at their end, which show nothing about how the stream ended."""
    if not lines.startswith(_COMMENT) and lines.find(b"\n:") < 0 and lines.find(b"\r:") < 0:
        return lines
    kept = lines.splitlines(keepends=True)
    while kept and (kept[-1].startswith(_COMMENT) or not kept[-1].strip()):
        kept.pop()
    return b"".join(kept)
