"""Bodies that clients have compressed (RFC 9110, 8.4.1): decoded within the bounds of a body,
however small they came.

Python has no decoder for zstd and br before 3.14. A client that gets the list of accepted codings
sends its body plainly.
"""

import zlib
from enum import auto
from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.errors import BadRequest, BodyTooLarge, UnsupportedCoding

# for Accept-Encoding of a refusal (RFC 9110, 15.5.16)
READ: Final = "gzip, deflate, identity"
_PIECE: Final = 64 * 1024  # bytes of a body that are decoded at a time
_MEMBERS_MOST: Final = 64  # of a gzip body, which may be several files in a row (RFC 1952, 2.2)
_SHOWN: Final = 60  # bytes of a coding's name that an error quotes
_GZIP_BITS: Final = 31  # of zlib.decompressobj: a gzip header, and the largest window
_ZLIB_BITS: Final = 15
_RAW_BITS: Final = -15


class Coding(FastStrEnum):
    """The compression of a body."""

    GZIP = auto()
    DEFLATE = auto()


_NAMES: Final = {b"gzip": Coding.GZIP, b"x-gzip": Coding.GZIP, b"deflate": Coding.DEFLATE}


def coding_of(declared: bytes) -> Coding | None:
    """Return the coding that a Content-Encoding declares; None: none.

    Raises:
        UnsupportedCoding: it is not supported here, or there are several.
    """
    names = [
        name
        for word in declared.lower().split(b",")
        if (name := word.strip(b" \t")) not in (b"", b"identity")
    ]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _NAMES:
        shown = declared[:_SHOWN].decode("latin-1")
        raise UnsupportedCoding(
            f"the body has the Content-Encoding {shown!r}: this router takes {READ}, one at a time"
        )
    return _NAMES[names[0]]


def decoded(coding: Coding, body: bytes, limit: int) -> bytes:
    """Return a decoded body of at most ``limit`` bytes.

    Raises:
        BodyTooLarge: it has more.
        BadRequest: it is not in this coding, or is incomplete.
    """
    try:
        if coding is Coding.GZIP:
            return _decoded(body, limit, _GZIP_BITS)
        # RFC 1950, 2.2
        is_zlib = len(body) > 1 and body[0] & 15 == 8 and (body[0] * 256 + body[1]) % 31 == 0
        return _decoded(body, limit, _ZLIB_BITS if is_zlib else _RAW_BITS)
    except zlib.error as exc:
        raise BadRequest(f"the body is not {coding}, as its Content-Encoding says: {exc}") from exc


def _decoded(body: bytes, limit: int, bits: int) -> bytes:
    decoder = zlib.decompressobj(bits)
    pieces = list[bytes]()
    size = 0
    members = 1
    for offset in range(0, len(body), _PIECE):
        rest = body[offset : offset + _PIECE]
        while rest:
            if decoder.eof:
                members += 1
                if bits != _GZIP_BITS or members > _MEMBERS_MOST:
                    raise BadRequest("the body goes on behind the end of its compressed data")
                decoder = zlib.decompressobj(bits)
            piece = decoder.decompress(rest, limit - size + 1)
            size += len(piece)
            if size > limit:
                raise BodyTooLarge(
                    f"the body has more than {limit} bytes once it is decoded, the most this router "
                    f"takes"
                )
            pieces.append(piece)
            rest = decoder.unconsumed_tail or decoder.unused_data
    if not decoder.eof:
        raise BadRequest("the body ends before its compressed data does")
    return b"".join(pieces)
