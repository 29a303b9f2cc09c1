"""Requests as clients nearly always send them: in one piece, with a head that says nothing out of the ordinary.

Such a head is read in a fraction of the time that llhttp and its callbacks take. Whatever does not fit to the last byte
is left to llhttp, so a request means the same either way; a test reads the same requests both ways.
"""

import re
from collections.abc import Mapping
from typing import Final

_MOST: Final = 64 * 1024  # bytes of a whole request; a longer one is looked at before it is read to its end
_HEAD_MOST: Final = 4096  # bytes
_LINES_MOST: Final = 257  # the request line and as many headers as core/framing.py lets in
_REQUEST: Final = re.compile(rb"POST ([!-~]++) HTTP/1\.1")
_LINE: Final = re.compile(rb"([-!#$%&'*+.^_`|~0-9A-Za-z]++): ([!-~]++(?: [!-~]++)*+)")
_LENGTH: Final = b"content-length"
_HOST: Final = b"host"
_LENGTH_MOST: Final = 9  # digits
# What these say changes how a request is read, or what becomes of its connection.
_ODD: Final = frozenset(
    {b"transfer-encoding", b"connection", b"proxy-connection", b"upgrade", b"expect", b"trailer", b"te", b"keep-alive"}
)
_KEEPS: Final = b"keep-alive"  # of a connection: what it does anyway
# Lines that were found to be usual, and what they say: a client sends the same ones with each request. None that is
# another one each time, and none that is nobody else's business.
_KNOWN: Final[dict[bytes, tuple[bytes, bytes]]] = {}
_REPEATED: Final = frozenset(
    {b"host", b"user-agent", b"accept", b"accept-encoding", b"accept-language", b"connection", b"content-type", _LENGTH}
)
_KNOWN_MOST: Final = 512
_KNOWN_BYTES: Final = 256  # of one line


def usual_request(received: bytes, paths: Mapping[bytes, str]) -> tuple[str, list[tuple[bytes, bytes]], bytes] | None:
    """Return path, headers and body of a whole, usual request for one of these paths; None: it is another one.

    The names of the headers are in lower case. Nothing follows the request, and its connection is kept.
    """
    end = received.find(b"\r\n\r\n", 0, _HEAD_MOST) if len(received) <= _MOST else -1
    if end < 0:
        return None
    lines = received[:end].split(b"\r\n")
    if len(lines) > _LINES_MOST:
        return None
    request = _REQUEST.fullmatch(lines[0])
    path = None if request is None else paths.get(request[1])
    if path is None:
        return None
    headers: list[tuple[bytes, bytes]] = []
    length, hosts = b"", 0
    for line in lines[1:]:
        header = _KNOWN.get(line) or _read(line)
        if header is None:
            return None
        if header[0] == _LENGTH:
            if length:
                return None
            length = header[1]
        elif header[0] == _HOST:
            hosts += 1
        headers.append(header)
    if hosts != 1 or not length.isdigit() or len(length) > _LENGTH_MOST or len(received) - end - 4 != int(length):
        return None
    return path, headers, received[end + 4 :]


def _read(line: bytes) -> tuple[bytes, bytes] | None:
    """Read a line; None: it is not a usual one."""
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    name, value = found[1].lower(), found[2]
    if name in _ODD and not (name == b"connection" and value.lower() == _KEEPS):
        return None
    header = name, value
    if name in _REPEATED and len(line) <= _KNOWN_BYTES:
        if len(_KNOWN) >= _KNOWN_MOST:
            _KNOWN.clear()
        _KNOWN[line] = header
    return header
