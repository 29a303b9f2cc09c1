"""What is refused before NIXL's C++ sees it."""

import contextlib
import random
import struct

import pytest

from pdrelay_connector.core.session.nixl_metadata import MAX_METADATA, check_metadata
from pdrelay_connector.errors import ProtocolViolation


def field(tag, value):
    return tag + struct.pack("<Q", len(value)) + value + b"|"


def metadata(*, agent=b"c6dfee79", count=1, backends=((b"UCX", b" address"),), section=b"MemSection"):
    """As NIXL 1.5.1 writes it (tests/integration/test_nixl.py checks a real one)."""
    told = [field(b"t", name) + field(b"c", address) for name, address in backends]
    memory = field(b"nixlSecElms", struct.pack("<Q", 1)) + field(b"bknd", b"UCX") + field(b"nixlDList", b"nixlSDList")
    memory += field(b"t", struct.pack("<I", 0)) + field(b"n", struct.pack("<Q", 1)) + field(b"", b"\0" * 33)
    head = field(b"Agent", agent) + field(b"Conns", struct.pack("<Q", count))
    return b"nixlSerDes|" + head + b"".join(told) + field(b"", section) + memory


WHOLE = metadata()


def test_whole_metadata_is_accepted():
    """Also with several backends."""
    check_metadata(WHOLE)
    check_metadata(metadata(count=2, backends=((b"UCX", b" address"), (b"GDS", b"x"))))


@pytest.mark.parametrize("size", range(len(WHOLE)))
def test_what_is_cut_off_is_refused(size):
    """At every byte: unless a field ends there, and then one that must follow is missing, or NIXL misses it."""
    cut = WHOLE[:size]
    if cut.endswith(b"|") and b"MemSection|" in cut:
        check_metadata(cut)
    else:
        with pytest.raises(ProtocolViolation, match="NIXL metadata"):
            check_metadata(cut)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "begins with b''"),
        (b"GET / HTTP/1.1", "it must begin with"),
        (WHOLE + b"x", "no whole field at byte"),
        (WHOLE.replace(b"Agent", b"Agant"), "no whole field"),
        (metadata(agent=b""), "one agent"),
        (metadata(agent=b"x" * 300), "one agent"),
        (metadata(count=2), "2 backends"),
        (metadata(count=1 << 40), "backends"),
        (metadata(section=b"Memory"), "no section"),
        (metadata(backends=((b"UCX", b""),)), "no version"),
        (metadata(backends=((b"UCX", b"\x2faddress"),)), "no version"),
        (b"nixlSerDes|" + b"Agent" + struct.pack("<Q", 1 << 63) + b"x|", "no whole field"),
        (b"nixlSerDes|" + b"x" * MAX_METADATA, "at most"),
    ],
    ids=[
        "empty",
        "http",
        "rest",
        "tag",
        "nameless",
        "long name",
        "fewer",
        "many",
        "section",
        "no address",
        "version",
        "length",
        "size",
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(data, sentence):
    """Naming what is wrong."""
    with pytest.raises(ProtocolViolation, match=sentence):
        check_metadata(data)


def test_whatever_bytes_come_it_returns_or_refuses():
    """In linear time, and never with another exception."""
    chance = random.Random(1)
    for _ in range(2000):
        data = bytearray(WHOLE)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with contextlib.suppress(ProtocolViolation):
            check_metadata(bytes(data))
