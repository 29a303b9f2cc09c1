"""The head of a request, as bytes into which no header can smuggle a line."""

import re
from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import Headers

_PATHS_MOST: Final = 64  # heads that are kept for an engine; the router knows fewer paths
_KNOWN_MOST: Final = 64  # headers of clients that are kept for an engine
_PORTS: Final = {"http": 80, "https": 443}
_PATH: Final = re.compile(r"/[!-~]*")
# One pass over all lines. Only the router sets headers that decide where a request ends (RFC 9112,
# 6) or which connection it concerns.
_LINES: Final = re.compile(
    rb"(?:(?!(?i:host|connection|content-length|transfer-encoding|expect|upgrade|te|trailer):)"
    rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++: [\t\x20-\x7e\x80-\xff]*+\r\n)*"
)


class Unsendable(Exception):
    """HTTP cannot carry the request; says why, without a header's value."""


class Heads:
    """Builds request heads for one address; the constant parts are built once."""

    __slots__ = ("_address", "_beginnings", "_known")

    def __init__(self, address: Address) -> None:
        self._address = address
        self._beginnings: dict[tuple[str, str], bytes] = {}
        self._known: dict[Headers, bytes] = {}

    def get(self, path: str, headers: Headers) -> bytes:
        """Return the head of a GET; raises Unsendable."""
        return self._beginning("GET", path) + lines_of(headers) + b"\r\n"

    def post(self, path: str, headers: Headers, length: int) -> bytes:
        """Return the head of a POST with a body of so many bytes; raises Unsendable."""
        return b"%b%bcontent-length: %d\r\n\r\n" % (
            self._beginning("POST", path),
            lines_of(headers),
            length,
        )

    def post_ours(self, path: str, headers: Headers, request: str, length: int) -> bytes:
        """Return the head of a POST of JSON with an id of the router's; raises Unsendable."""
        lines = self._lines(headers) if headers else b""
        beginning = self._beginnings.get(("POST", path)) or self._beginning("POST", path)
        own_lines = (
            f"x-request-id: {request}\r\ncontent-type: application/json\r\ncontent-length: "
            f"{length}\r\n\r\n"
        )
        return beginning + lines + own_lines.encode("ascii")

    def _lines(self, headers: Headers) -> bytes:
        """Return the lines of a client's headers; clients send the same ones each time."""
        lines = self._known.get(headers)
        if lines is None:
            lines = lines_of(headers)
            if len(self._known) >= _KNOWN_MOST:
                self._known.clear()
            self._known[headers] = lines
        return lines

    def _beginning(self, method: str, path: str) -> bytes:
        beginning = self._beginnings.get((method, path))
        if beginning is None:
            if not _PATH.fullmatch(path):
                raise Unsendable(
                    f"the path {path!r} cannot be sent: it must be printable ASCII without spaces"
                )
            if len(self._beginnings) >= _PATHS_MOST:
                self._beginnings.clear()
            beginning = self._beginnings[method, path] = _beginning(self._address, method, path)
        return beginning


def lines_of(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the lines of headers.

    Raises:
        Unsendable: a name or a value cannot be sent, for instance with a line break in it.
    """
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if _LINES.fullmatch(lines) is None or lines.count(b"\n") != len(headers):
        raise Unsendable(f"the header {_culprit(headers)!r} cannot be sent")
    return lines


def _culprit(headers: Sequence[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        line = b"%b: %b\r\n" % (name, value)
        if _LINES.fullmatch(line) is None or line.count(b"\n") != 1:
            return name[:64].decode("latin-1")
    return ""


def _beginning(address: Address, method: str, path: str) -> bytes:
    host = address.authority
    if address.port == _PORTS[address.scheme]:
        host = host.removesuffix(f":{address.port}")
    # a stream must not wait for a compressor
    fixed = f"host: {host}\r\naccept: */*\r\naccept-encoding: identity\r\nuser-agent: pdrelay\r\n"
    return f"{method} {path} HTTP/1.1\r\n{fixed}".encode("ascii")
