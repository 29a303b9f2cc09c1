"""The frame of NIXL's agent metadata, checked before NIXL's C++ parses it.

NIXL 1.5 writes ``nixlSerDes|`` and then fields: a tag (which may be empty), 8 bytes of length, that
many bytes and ``|`` (``src/utils/serdes`` in NIXL). A truncated or altered blob can abort the
process that loads it, so that of a peer is only looked at after the peer has proven itself, and
only loaded if its frame is whole.
"""

import struct
from collections.abc import Iterator

from pdrelay_connector.errors import ProtocolViolation

MAGIC = b"nixlSerDes|"
MAX_METADATA = 16 << 20  # bytes of one rank's
MAX_NAME = 255  # bytes of an agent's name
MAX_BACKENDS = 16
_LENGTH = struct.Struct("<Q")
_TAGS = (b"nixlSecElms", b"nixlDList", b"Agent", b"Conns", b"bknd", b"t", b"c", b"n", b"")
_UCX_ADDRESS_VERSIONS = 2  # the low bits of a UCX worker address say which; UCX aborts at others


def check_metadata(data: bytes) -> None:
    """Raise :exc:`~pdrelay_connector.errors.ProtocolViolation`: not the metadata of one agent."""
    if len(data) > MAX_METADATA:
        raise ProtocolViolation(
            f"NIXL metadata of {len(data)} bytes; at most {MAX_METADATA} are allowed"
        )
    if not data.startswith(MAGIC):
        raise ProtocolViolation(
            f"NIXL metadata begins with {data[:11]!r}; it must begin with {MAGIC!r}"
        )
    fields = list(_fields(data))
    tags = [tag for tag, _ in fields]
    if (
        tags[:2] != [b"Agent", b"Conns"]
        or not 0 < len(fields[0][1]) <= MAX_NAME
        or len(fields[1][1]) != _LENGTH.size
    ):
        raise ProtocolViolation(
            "NIXL metadata does not begin with one agent and the number of its backends"
        )
    (backends,) = _LENGTH.unpack(fields[1][1])
    if not 0 < backends <= MAX_BACKENDS or tags[2 : 2 + 2 * backends] != [b"t", b"c"] * backends:
        raise ProtocolViolation(
            f"NIXL metadata says that it has {backends} backends, and has others"
        )
    if fields[2 + 2 * backends : 3 + 2 * backends] != [(b"", b"MemSection")]:
        raise ProtocolViolation("NIXL metadata has no section that names memory")
    for (_, name), (_, address) in zip(
        fields[2 : 2 + 2 * backends : 2], fields[3 : 3 + 2 * backends : 2], strict=True
    ):
        if not address or (name == b"UCX" and address[0] & 0x0F >= _UCX_ADDRESS_VERSIONS):
            raise ProtocolViolation(
                f"NIXL metadata has an address of backend {name!r} that no version of it writes"
            )


def _fields(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield tags and values; raises :exc:`~pdrelay_connector.errors.ProtocolViolation`."""
    place = len(MAGIC)
    while place < len(data):
        for tag in _TAGS:
            start = place + len(tag) + _LENGTH.size
            if not data.startswith(tag, place) or start > len(data):
                continue
            stop = start + _LENGTH.unpack_from(data, start - _LENGTH.size)[0]
            if stop < len(data) and data[stop : stop + 1] == b"|":
                yield tag, data[start:stop]
                place = stop + 1
                break
        else:
            raise ProtocolViolation(
                f"NIXL metadata has no whole field at byte {place} of {len(data)}"
            )
