"""What is known of engines, and whom it keeps apart."""

import pytest

from xpyd_proxy.core.fleet.compatibility import MODES, Facts, fit
from xpyd_proxy.core.fleet.push_coordinates import State
from xpyd_proxy.core.protocol.push import TransferMode


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        (Facts(), Facts(), True),
        (Facts(version="0.32"), Facts(version="0.31"), False),
        (Facts(version="0.32"), Facts(), True),
        (Facts(connector="xpyd"), Facts(connector="nixl"), False),
        (Facts(connector="xpyd"), Facts(connector="xpyd"), True),
        (Facts(mode=TransferMode.PUSH), Facts(mode=TransferMode.PULL), False),
        (Facts(mode=TransferMode.PUSH), Facts(), True),
        (Facts(protocol="4"), Facts(protocol="3"), False),
        (Facts(fingerprint="0123456789abcdef"), Facts(fingerprint="fedcba9876543210"), False),
        (Facts(protocol="4", fingerprint="0123456789abcdef"), Facts(connector="xpyd"), True),
    ],
)
def test_what_is_known_of_both_must_agree(one, other, fits):
    """vLLM refuses the handshake between versions, and connectors do not understand each other's params."""
    assert fit(one, other) is fits
    assert fit(other, one) is fits


def test_news_replace_what_they_speak_of_and_nothing_else():
    """Probes and answers each know a part."""
    facts = Facts(frozenset({"m"}), "0.32").updated(Facts(mode=TransferMode.PUSH)).updated(Facts(frozenset(), "0.33"))

    assert facts == Facts(frozenset(), "0.33", None, TransferMode.PUSH)


@pytest.mark.parametrize(
    ("models", "asked", "serves"), [(None, "a", True), ({"a"}, "a", True), ({"a"}, "b", False), ({"a"}, None, True)]
)
def test_an_engine_serves_the_models_it_lists(models, asked, serves):
    """One that lists none may serve any: it says so itself if it does not."""
    assert Facts(models if models is None else frozenset(models)).serves(asked) is serves


def test_only_an_answer_teaches_a_mode():
    """An engine that has not answered yet may be either."""
    assert set(State) - set(MODES) == {State.UNKNOWN}
