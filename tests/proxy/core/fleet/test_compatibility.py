"""What is known of engines, and whom it keeps apart."""

import pytest

from pdrelay_proxy.core.fleet.compatibility import MODES, EngineCapabilities, difference, fit
from pdrelay_proxy.core.fleet.push_coordinates import CoordinatesState
from pdrelay_proxy.core.protocol.push import EngineMode


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        (EngineCapabilities(), EngineCapabilities(), True),
        (EngineCapabilities(version="0.32"), EngineCapabilities(version="0.31"), False),
        (EngineCapabilities(version="0.32"), EngineCapabilities(), True),
        (EngineCapabilities(connector="pdrelay"), EngineCapabilities(connector="nixl"), False),
        (EngineCapabilities(connector="pdrelay"), EngineCapabilities(connector="pdrelay"), True),
        (EngineCapabilities(mode=EngineMode.PUSH), EngineCapabilities(mode=EngineMode.PULL), False),
        (EngineCapabilities(mode=EngineMode.PUSH), EngineCapabilities(), True),
        (EngineCapabilities(protocol="4"), EngineCapabilities(protocol="3"), False),
        (EngineCapabilities(fingerprint="0123456789abcdef"), EngineCapabilities(fingerprint="fedcba9876543210"), False),
        (
            EngineCapabilities(protocol="4", fingerprint="0123456789abcdef"),
            EngineCapabilities(connector="pdrelay"),
            True,
        ),
    ],
)
def test_what_is_known_of_both_must_agree(one, other, fits):
    """vLLM refuses the handshake between versions, and connectors do not understand each other's params."""
    assert fit(one, other) is fits
    assert fit(other, one) is fits


def test_a_decode_engine_shares_nothing_with_one_that_it_has_refused():
    """Their labels may be equal: the handshake compares more."""
    decode = EngineCapabilities(incompatible=frozenset({"a"}))

    assert not fit(EngineCapabilities(engine_id="a"), decode)
    assert fit(EngineCapabilities(engine_id="b"), decode)
    assert fit(EngineCapabilities(), decode)
    assert fit(EngineCapabilities(engine_id="a"), decode.updated(EngineCapabilities(incompatible=frozenset())))
    assert not fit(EngineCapabilities(engine_id="a"), decode.updated(EngineCapabilities()))


def test_what_differs_is_named_with_both_values():
    """An operator must see what to change, and where."""
    one = EngineCapabilities(version="0.32", fingerprint="a")

    assert difference(one, EngineCapabilities(version="0.33")) == "vLLM's version is 0.32 there and 0.33 here"
    assert difference(one, EngineCapabilities(fingerprint="b")) == "the connector's fingerprint is a there and b here"
    assert "its log says why" in difference(one, EngineCapabilities())


def test_news_replace_what_they_speak_of_and_nothing_else():
    """Probes and answers each know a part."""
    facts = (
        EngineCapabilities(frozenset({"m"}), "0.32")
        .updated(EngineCapabilities(mode=EngineMode.PUSH))
        .updated(EngineCapabilities(frozenset(), "0.33"))
    )

    assert facts == EngineCapabilities(frozenset(), "0.33", None, EngineMode.PUSH)


@pytest.mark.parametrize(
    ("models", "asked", "serves"), [(None, "a", True), ({"a"}, "a", True), ({"a"}, "b", False), ({"a"}, None, True)]
)
def test_an_engine_serves_the_models_it_lists(models, asked, serves):
    """One that lists none may serve any: it says so itself if it does not."""
    assert EngineCapabilities(models if models is None else frozenset(models)).serves(asked) is serves


def test_only_an_answer_teaches_a_mode():
    """An engine that has not answered yet may be either."""
    assert set(CoordinatesState) - set(MODES) == {CoordinatesState.UNKNOWN}
