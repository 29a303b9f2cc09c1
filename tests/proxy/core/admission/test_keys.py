"""API keys, inbound and outbound."""

import hashlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.admission.keys import Keyring, Keys, Outbound, outbound_key
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.errors import ConfigError, Unauthorized

HASH = hashlib.sha256(b"key-of-b-in-full").hexdigest()
FILE = f"""
# who may ask
team-a:sk-one-of-16-chars
team-a:sk-two-of-16-chars
b:sha256:{HASH}
c:with:a-colon-in-it
"""


@pytest.mark.parametrize(
    ("shown", "owner"),
    [
        (b"sk-one-of-16-chars", "team-a"),
        (b"sk-two-of-16-chars", "team-a"),
        (b"key-of-b-in-full", "b"),
        (b"with:a-colon-in-it", "c"),
        (HASH.encode(), None),  # who reads the file cannot ask
        (b"sk-one-of-16-char", None),
        (b"", None),
        (b"team-a:sk-one-of-16-chars", None),
    ],
)
def test_a_key_has_an_owner(shown, owner):
    """An owner may have several keys, so that one can be replaced without a gap."""
    assert Keys.parse(FILE, "keys").owner(shown) == owner


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "a:key-1-of-16-chars\nsecret",
            "keys, line 2, is not a key: write name:key or name:sha256:<64 hexadecimal digits>",
        ),
        ("a b:secret", "keys, line 1, is not a key"),
        ("a:", "keys, line 1, is not a key"),
        ("a:secret secret", "keys, line 1, is not a key"),
        ("a:sha256:secret", "keys, line 1, is not a key"),
        ("a:long-secret-01234\n\nb:long-secret-01234", "keys, line 3, has the key of a once more"),
        ("# only a comment, secret", "keys has no key in it, so nobody could ask"),
        ("", "keys has no key in it"),
        ("a:secret priority=high", "keys, line 1, is not a key"),
        ("a:secret priority=-1 priority=-2", "keys, line 1, is not a key"),
        (
            "# ours\na:long-secret-012",
            "keys, line 2: the key of a has 15 characters, and 16 is the least: write a longer one$",
        ),
        ("a:secret rate=1", "keys, line 1, is not a key: .* behind it priority=N"),
        (
            "a:long-secret-01234 priority=-1\na:secret2-0123456789",
            "keys, line 2, gives a another priority: write the same on each",
        ),
    ],
)
def test_a_wrong_file_is_told_by_its_line_and_never_by_its_content(text, says):
    """What is wrong in it may be a key."""
    with pytest.raises(ConfigError, match=f"^{says}") as caught:
        Keys.parse(text, "keys")

    assert "secret" not in str(caught.value)


LINES = (
    "a:key-1-of-16-chars priority=-10",
    "a:key-2-of-16-chars  priority=-10",
    "b:key-3-of-16-chars",
    "c:key-4-of-16-chars priority=5",
)


def test_an_owner_may_be_more_important_than_others():
    """As the file says; who has no number there is as important as the rest."""
    keys = Keys.parse("".join(f"{line}\n" for line in LINES), "keys")
    ring = Keyring(keys)

    assert keys.owner(b"key-2-of-16-chars") == "a"
    assert [ring.least_of(name) for name in "abc"] == [-10, 0, 5]
    assert Keyring(None).least_of("-") == 0


def test_each_request_takes_as_long_among_thousands_of_keys_as_among_few():
    """Compared with each of 10,000, a key took 0.4 ms, and a wrong one up to four times that."""
    keys = Keys.parse("".join(f"name-{number}:key-{number:020d}\n" for number in range(10_000)), "keys")
    wrong = ((b"authorization", b"Bearer x:wrong-key-of-16-chars"), (b"x-api-key", b"y:wrong-key-of-16-chars"))
    began = time.process_time()

    for number in range(1000):
        assert keys.owner(b"key-%020d" % number) == f"name-{number}"
        with pytest.raises(Unauthorized):
            Keyring(keys).caller(wrong)

    assert time.process_time() - began < 0.3


def test_no_key_is_ever_printed():
    """Objects end up in logs and tracebacks."""
    keys = Keys.parse(FILE, "keys")
    outbound = Outbound({Role.PREFILL: "sk-engine"})

    assert "sk-" not in repr(keys)
    assert "sk-" not in str(vars(Outbound)) + repr(outbound)
    assert b"sk-one-of-16-chars" not in b"".join(keys.owners)


def test_a_client_that_sends_the_name_too_learns_what_to_leave_out():
    """A line of the file is name:key, and people copy lines. Of a wrong key nothing is said."""
    ring = Keyring(Keys.parse(FILE, "keys"))

    with pytest.raises(Unauthorized, match="send the part after the colon"):
        ring.caller(((b"authorization", b"Bearer team-a:sk-one-of-16-chars"),))
    with pytest.raises(Unauthorized, match="send the part after the colon"):
        ring.caller(((b"x-api-key", b"c:with:a-colon-in-it"),))
    with pytest.raises(Unauthorized, match="not one that this router knows"):
        ring.caller(((b"authorization", b"Bearer team-a:sk-one-of-16-char"),))


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=16).filter(lambda k: k[:7] != "sha256:"))
def test_whatever_a_header_can_carry_can_be_a_key(key):
    """In the clear or as a digest."""
    plain = Keys.parse(f"a:{key}", "keys")
    hashed = Keys.parse(f"a:sha256:{hashlib.sha256(key.encode()).hexdigest()}", "keys")

    assert plain == hashed
    assert plain.owner(key.encode()) == "a"
    assert plain.owner(key.encode() + b"x") is None


def test_an_engine_gets_its_own_key_in_place_of_the_clients():
    """If its pool has one; the other pool's is not for it, and the client's neither."""
    headers = ((b"authorization", b"Bearer client"), (b"traceparent", b"00"))
    outbound = Outbound({Role.PREFILL: "engine"})

    assert outbound.headers(Role.PREFILL, headers) == (headers[1], (b"authorization", b"Bearer engine"))
    assert outbound.headers(Role.DECODE, headers) == headers[1:]
    outbound.change({})
    assert outbound.headers(Role.PREFILL, headers) == headers[1:]


@pytest.mark.parametrize("text", ["", "two words", "two\nlines", "clé"])
def test_an_outbound_key_fits_a_header(text):
    """Else every request to that engine would fail."""
    assert outbound_key(" key\n", "file") == "key"
    with pytest.raises(ConfigError, match=r"^file is not an API key: write one line") as caught:
        outbound_key(text, "file")
    assert not text or text not in str(caught.value)
