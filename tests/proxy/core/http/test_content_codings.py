"""Compressed bodies: what is read, within which bounds, and what is said of the rest."""

import gzip
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.http.content_codings import Coding, coding_of, decoded
from pdrelay_proxy.errors import BadRequest, BodyTooLarge, UnsupportedCoding


def raw_deflate(body):
    """Deflate without zlib's head, as some clients send it."""
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


PACKERS = {
    "gzip": (Coding.GZIP, gzip.compress),
    "two files": (Coding.GZIP, lambda body: gzip.compress(body[:7]) + gzip.compress(body[7:])),
    "zlib": (Coding.DEFLATE, zlib.compress),
    "raw deflate": (Coding.DEFLATE, raw_deflate),
}


@pytest.mark.parametrize(
    ("declared", "coding"),
    [
        (b"", None),
        (b"identity", None),
        (b"gzip", Coding.GZIP),
        (b"x-gzip", Coding.GZIP),
        (b" GZip , identity", Coding.GZIP),
        (b"deflate", Coding.DEFLATE),
    ],
)
def test_what_is_declared(declared, coding):
    """RFC 9110, 8.4.1: names are the same in any case."""
    assert coding_of(declared) is coding


@pytest.mark.parametrize("declared", [b"zstd", b"br", b"compress", b"gzip, gzip", b"gzip, zstd", b"gzip;q=1", b"\xff"])
def test_another_coding_is_named(declared):
    """With those that are read."""
    with pytest.raises(UnsupportedCoding) as refused:
        coding_of(declared)

    assert repr(declared.decode("latin-1")) in str(refused.value)
    assert "gzip, deflate, identity" in str(refused.value)


@pytest.mark.parametrize("packer", PACKERS)
@given(body=st.binary(max_size=300), more=st.integers(0, 3))
def test_a_body_is_what_it_was(packer, body, more):
    """Up to the last byte that it may have."""
    coding, pack = PACKERS[packer]

    assert decoded(coding, pack(body), len(body) + more) == body


@pytest.mark.parametrize("packer", PACKERS)
def test_a_long_body_is_what_it_was(packer):
    """It is decoded in pieces."""
    coding, pack = PACKERS[packer]
    body = bytes(number * number % 251 for number in range(700_000))

    assert decoded(coding, pack(body), len(body)) == body
    with pytest.raises(BodyTooLarge, match="once it is decoded"):
        decoded(coding, pack(body), len(body) - 1)


@pytest.mark.parametrize("packer", PACKERS)
def test_a_bomb_takes_no_more_memory_than_a_body(packer):
    """Four megabytes of zeros a kilobyte: decoding ends where the limit is."""
    coding, pack = PACKERS[packer]
    bomb = pack(bytes(200_000_000))
    began = time.process_time()

    with pytest.raises(BodyTooLarge):
        decoded(coding, bomb, 1_000_000)

    assert time.process_time() - began < 1


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda packed: packed[:-1],
        lambda packed: packed[: len(packed) // 2],
        lambda packed: packed[: len(packed) // 2] + b"\x07" + packed[len(packed) // 2 :],
        lambda packed: b"",
        lambda packed: b'{"prompt": "x"}',
        lambda packed: packed + b"{}",
    ],
    ids=["cut", "half", "one more byte", "empty", "plain", "something behind"],
)
def test_what_cannot_be_decoded_is_the_clients_mistake(packer, spoil):
    """One sentence, and nothing of what it says."""
    coding, pack = PACKERS[packer]
    with pytest.raises(BadRequest, match="the body"):
        decoded(coding, spoil(pack(b'{"prompt": "once upon a time"}' * 9)), 1000)


def test_files_without_end_are_given_up():
    """An empty one has twenty bytes: a body could hold a million of them."""
    with pytest.raises(BadRequest, match="goes on behind the end"):
        decoded(Coding.GZIP, gzip.compress(b"") * 100_000, 1000)
