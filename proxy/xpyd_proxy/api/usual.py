"""Requests as clients nearly always send them: in one piece, with a head that says nothing out of the ordinary.

One pattern reads such a head in a fraction of the time that llhttp and its callbacks take. Whatever does not fit it to
the last byte is left to llhttp, so a request means the same either way; a test reads the same requests both ways.
"""

import re
from collections.abc import Mapping
from typing import Final

_HEAD_MOST: Final = 4096  # bytes
_MOST: Final = 64 * 1024  # bytes of a whole request; a longer one is looked at before it is read to its end
_NAME: Final = rb"[-!#$%&'*+.^_`|~0-9A-Za-z]++"
_VALUE: Final = rb"[!-~]++(?: [!-~]++)*+"
_HEAD: Final = re.compile(rb"POST ([!-~]++) HTTP/1\.1\r\n((?:%b: %b\r\n)++)\r\n" % (_NAME, _VALUE))
_LENGTH: Final = b"content-length"
_LENGTH_MOST: Final = 9  # digits
# What these say changes how a request is read, or what becomes of its connection.
_ODD: Final = frozenset(
    {b"transfer-encoding", b"connection", b"proxy-connection", b"upgrade", b"expect", b"trailer", b"te", b"keep-alive"}
)
_KEEPS: Final = b"keep-alive"  # of a connection: what it does anyway


def usual_request(received: bytes, paths: Mapping[bytes, str]) -> tuple[str, list[tuple[bytes, bytes]], bytes] | None:
    """Return path, headers and body of a whole, usual request for one of these paths; None: it is another one.

    The names of the headers are in lower case. Nothing follows the request, and its connection is kept.
    """
    head = _HEAD.match(received, 0, _HEAD_MOST) if len(received) <= _MOST else None
    if head is None:
        return None
    path = paths.get(head[1])
    if path is None:
        return None
    headers: list[tuple[bytes, bytes]] = []
    length = b""
    for line in head[2][:-2].split(b"\r\n"):
        said, _, value = line.partition(b": ")
        name = said.lower()
        if name == _LENGTH:
            if length:
                return None
            length = value
        elif name in _ODD and not (name == b"connection" and value.lower() == _KEEPS):
            return None
        headers.append((name, value))
    if not length.isdigit() or len(length) > _LENGTH_MOST or len(received) - head.end() != int(length):
        return None
    return path, headers, received[head.end() :]
