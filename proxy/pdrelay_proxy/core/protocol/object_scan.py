"""Removes the members of one name from JSON of any depth: one pass over its tokens, without
recursion.
"""

import re
from enum import Enum, auto
from typing import Final

from pdrelay_proxy.core.raw_json import NotJson, decode

_TOKEN: Final = re.compile(
    rb"[ \t\r\n]*+("
    rb'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
    rb"|[{}\[\]:,]"
    rb"|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?"
    rb"|true|false|null"
    rb")[ \t\r\n]*+"
)
_COMMA: Final = b","
_COLON: Final = b":"
_OPENING: Final = (b"{", b"[")
_MARKS: Final = (b"}", b"]", _COMMA, _COLON)


class _Next(Enum):
    """The tokens that may come next."""

    VALUE = auto()
    VALUE_OR_END = auto()  # of an array that has just begun
    NAME = auto()
    NAME_OR_END = auto()  # of an object that has just begun
    COLON = auto()
    COMMA_OR_END = auto()
    NOTHING = auto()


class _Scan:
    """The state of a scan, and the tokens that it keeps."""

    def __init__(self, name: str) -> None:
        self.kept: list[bytes] = []
        self.expected = _Next.VALUE
        self._name = name
        # the closing brackets of the open objects and arrays, the outer ones first
        self._open: list[bytes] = []
        # for each of those: the next kept member needs a comma before it
        self._has_members: list[bool] = []
        self._cut_at = 0  # how many are open around the member being removed; 0: none is removed

    def add(self, token: bytes) -> None:
        """Read the next token; raises NotJson: it cannot stand here."""
        expected = self.expected
        if expected is _Next.VALUE or (expected is _Next.VALUE_OR_END and token != b"]"):
            self._add_value(token)
        elif token[:1] == b'"' and (expected is _Next.NAME or expected is _Next.NAME_OR_END):
            self._add_name(token)
        elif token == _COLON and expected is _Next.COLON:
            self._keep(token)
            self.expected = _Next.VALUE
        elif expected in (_Next.VALUE_OR_END, _Next.NAME_OR_END, _Next.COMMA_OR_END):
            self._add_separator(token)
        else:
            raise NotJson(f"{token[:20]!r} cannot stand here")

    def _add_value(self, token: bytes) -> None:
        if token in _MARKS:
            raise NotJson(f"{token!r} is no value")
        self._keep(token)
        if token not in _OPENING:
            self.expected = _Next.COMMA_OR_END if self._open else _Next.NOTHING
            return
        is_object = token == b"{"
        self._open.append(b"}" if is_object else b"]")
        self._has_members.append(False)
        self.expected = _Next.NAME_OR_END if is_object else _Next.VALUE_OR_END

    def _add_name(self, token: bytes) -> None:
        self.expected = _Next.COLON
        if self._cut_at:
            return
        if decode(token, str) == self._name:
            self._cut_at = len(self._open)
            return
        if self._has_members[-1]:
            self._keep(_COMMA)
        self._has_members[-1] = True
        self._keep(token)

    def _add_separator(self, token: bytes) -> None:
        """Read the token behind a value: a comma, or the end of an object or array."""
        if self._cut_at == len(self._open):
            self._cut_at = 0
        if token == self._open[-1]:
            self._keep(token)
            self._open.pop()
            self._has_members.pop()
            self.expected = _Next.COMMA_OR_END if self._open else _Next.NOTHING
        elif token != _COMMA or self.expected is not _Next.COMMA_OR_END:
            raise NotJson(f"{token[:20]!r} stands behind a value")
        elif self._open[-1] == b"}":
            self.expected = _Next.NAME  # its comma is written with the next kept member
        else:
            self._keep(token)
            self.expected = _Next.VALUE

    def _keep(self, token: bytes) -> None:
        if not self._cut_at:
            self.kept.append(token)


def without_name(text: bytes, name: str) -> bytes:
    """Return JSON without the members of one name, wherever they are; raises NotJson."""
    scan = _Scan(name)
    offset = 0
    while offset < len(text):
        token = _TOKEN.match(text, offset)
        if token is None:
            raise NotJson(f"no JSON at byte {offset}")
        scan.add(token[1])
        offset = token.end()
    if scan.expected is not _Next.NOTHING:
        raise NotJson("it ends too early")
    return b"".join(scan.kept)
