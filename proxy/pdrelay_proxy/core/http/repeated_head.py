"""Heads that a connection repeats: most clients send the same head with each request, except for
its Content-Length.
"""

from typing import Final

from pdrelay_proxy.core.http.framing import LENGTH_DIGITS_MOST, Head, read_head

_KEPT_MOST: Final = 2048  # bytes of a head that is kept for the next one of its connection
_KEPT_LINES: Final = 48  # its header lines; OpenAI's client sends some 20
_NAME: Final = b"content-length"
_LINE: Final = b"\r\n%b:" % _NAME


class RepeatedHead:
    """Reads the heads of one connection.

    A head that differs from the one before only in the digits of its Content-Length is valid, too,
    and means the same otherwise: it is compared and not parsed, at a tenth of the cost.
    """

    __slots__ = ("_before", "_behind", "_last", "_place")

    def __init__(self) -> None:
        self._last: Head | None = None  # the head before, if it may be repeated
        self._before = self._behind = b""  # the bytes on both sides of the digits
        self._place = 0  # of Content-Length among its headers

    def read(self, raw: bytes) -> Head:
        """Return a whole head; raises as ``read_head``."""
        last = self._last
        before = self._before
        behind = self._behind
        start = len(before)
        end = len(raw) - len(behind)
        if last is not None and start < end <= start + LENGTH_DIGITS_MOST and raw[:start] == before:
            digits = raw[start:end]
            if digits.isdigit() and raw[end:] == behind:  # ASCII digits: these are bytes
                return last.with_length(raw, digits, self._place)
        head = read_head(raw)
        self._keep(head)
        return head

    def _keep(self, head: Head) -> None:
        """Keep a head that may be repeated: a short one, with a Content-Length."""
        self._last = None
        raw = head.raw
        digits = head.shown.get(_NAME)
        if (
            digits is None
            or len(raw) > _KEPT_MOST
            or len(head.headers) > _KEPT_LINES
            or b"upgrade" in head.shown
        ):
            return
        # only white space is between the name and the digits
        start = raw.find(digits, raw.lower().index(_LINE) + len(_LINE))
        self._before = raw[:start]
        self._behind = raw[start + len(digits) :]
        self._last = head
        self._place = head.headers.index((_NAME, digits))
