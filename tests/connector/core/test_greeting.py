"""Who may talk to a prefill engine."""

import pytest

from support.engines import FINGERPRINT, changed, rank_info
from xpyd_connector.core.greeting import NONCE_BYTES, Guest, Host, prove
from xpyd_connector.core.ids import EngineId, RequestId
from xpyd_connector.core.messages import PROTOCOL, Challenge, Drop, Refusal, Welcome
from xpyd_connector.errors import ProtocolViolation

WELCOME = Welcome(PROTOCOL, EngineId("p0"), FINGERPRINT, (rank_info("p0"),))
NONCE, OTHER_NONCE = b"n" * NONCE_BYTES, b"m" * NONCE_BYTES


def greet(*, host=b"", guest=b"", asked=NONCE, checked=NONCE):
    hello = Guest(EngineId("d0"), guest).hello(Challenge(asked))
    return Host(WELCOME, host).answer(hello, checked)


@pytest.mark.parametrize("secret", [b"", b"s"])
def test_equal_secrets_are_welcome(secret):
    """No secret on either side is the default in a network of one's own."""
    assert greet(host=secret, guest=secret) == WELCOME


@pytest.mark.parametrize(("host", "guest"), [(b"s", b""), (b"", b"s"), (b"s", b"t")])
def test_a_missing_or_other_secret_is_refused(host, guest):
    """And the sentence names the variable, on whichever side it is missing."""
    answer = greet(host=host, guest=guest)

    assert isinstance(answer, Refusal)
    assert "XPYD_CONNECTOR_SECRET" in answer.reason


def test_a_recorded_hello_is_worth_nothing():
    """It proves the secret for one nonce, and each connection has its own."""
    assert isinstance(greet(host=b"s", guest=b"s", asked=OTHER_NONCE), Refusal)


def test_the_proof_does_not_give_the_secret_away():
    """It travels in the clear."""
    proof = prove(b"secret", NONCE)

    assert b"secret" not in proof
    assert proof != prove(b"secret", OTHER_NONCE)


def test_another_protocol_is_refused_naming_both():
    """A rolling update must tell which side is old."""
    hello = changed(Guest(EngineId("d0"), b"").hello(Challenge(NONCE)), protocol=PROTOCOL + 1)

    assert Host(WELCOME, b"").answer(hello, NONCE) == Refusal(
        f"engine p0 speaks protocol {PROTOCOL}, you speak {PROTOCOL + 1}"
    )


def test_whoever_does_not_greet_is_refused():
    """Nothing about blocks is heard before a hello."""
    answer = Host(WELCOME, b"").answer(Drop((RequestId("a"),)), NONCE)

    assert answer == Refusal("the first message must be a hello")


def test_a_guest_expects_a_challenge():
    """Something else listens on that port."""
    with pytest.raises(ProtocolViolation, match="expected a challenge, got Drop"):
        Guest(EngineId("d0"), b"").hello(Drop(()))
