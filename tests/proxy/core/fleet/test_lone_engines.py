"""Engines that share no request with any other, and the reasons in a sentence."""

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.lone_engines import lone_engines_in_steps
from pdrelay_proxy.core.fleet.pair_history import PairHistory, PairTrouble
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.core.steps import finish

PLAIN = {"models": frozenset({"m"}), "mode": EngineMode.PULL, "fingerprint": "aa"}


def fleet(*engines):
    registry = Registry()
    for port, (role, changes) in enumerate(engines, start=1):
        name = registry.add(role, Address("http", "h", port)).id
        registry.learn(name, EngineCapabilities(**{**PLAIN, "engine_id": f"e-{name}", **changes}))
    return registry


def texts(registry):
    return [each.text for each in finish(lone_engines_in_steps(registry, PairHistory()))]


PREFILL, DECODE = (Role.PREFILL, {}), (Role.DECODE, {})


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"mode": EngineMode.AUTO}, "the mode is pull there and auto here"),
        ({"mode": EngineMode.AUTO, "fingerprint": "bb"},
         "the mode is pull there and auto here, the connector's fingerprint is aa there and bb here"),
        ({"incompatible": frozenset({"e-prefill-0"})},
         "decode-1 has refused the KV cache of prefill-0, and its log says why"),
    ],
)  # fmt: skip
def test_an_engine_that_fits_no_other_is_named_with_all_reasons(changes, reasons):
    """It answers probes, and its loads would show only after the first requests."""
    registry = fleet(PREFILL, DECODE, (Role.DECODE, changes))

    assert texts(registry) == [f"decode-1: no prefill engine shares a request with it: {reasons}"]


def test_engines_of_a_kind_share_a_sentence_and_each_reason_is_there_once():
    """A fleet in a rollout has hundreds of them."""
    old, new = {"version": "0.32"}, {"version": "0.33"}
    registry = fleet(*[(Role.PREFILL, old)] * 2, *[(Role.DECODE, old)] * 2, *[(Role.DECODE, new)] * 2)

    why = "vLLM's version is 0.32 there and 0.33 here"
    assert texts(registry) == [f"decode-2, decode-3: no prefill engine shares a request with them: {why}"]


@pytest.mark.parametrize(
    "engines",
    [
        [PREFILL, DECODE],
        [PREFILL, (Role.PREFILL, {"fingerprint": "bb"}), (Role.DECODE, {"fingerprint": "bb"}), DECODE],
        [PREFILL, (Role.DECODE, {"mode": None, "fingerprint": None, "models": None})],  # nothing is known of it yet
        [PREFILL, (Role.PREFILL, {"fingerprint": "bb"})],  # there is no other role, which /health says
    ],
)
def test_who_has_a_partner_or_may_have_one_is_not_named(engines):
    """A warning that is not true is the last one that is read."""
    assert texts(fleet(*engines)) == []


def test_an_engine_of_its_own_model_may_be_meant_to_serve_alone():
    """An embedder among decode engines, say: who lists engines is not told, who adds one is."""
    registry = fleet(PREFILL, DECODE, (Role.DECODE, {"models": frozenset({"embedder"})}))

    (found,) = finish(lone_engines_in_steps(registry, PairHistory()))
    assert not found.have_model
    assert found.text.endswith("shares a request with it: the model is m there and embedder here")


def test_another_secret_is_known_after_the_first_request():
    """From what the decode engine shows, before the pair rests; only a cause that lasts counts."""
    registry = fleet(PREFILL, DECODE)
    pair = "prefill-0", "decode-0"
    registry.troubles[pair] = PairTrouble("transfer", "the network failed", lasts=False)
    assert texts(registry) == []

    registry.troubles[pair] = PairTrouble("secret", "its offer has another signature", lasts=True)

    why = "decode-0 loads no KV of prefill-0: its offer has another signature"
    assert texts(registry) == [
        f"prefill-0: no decode engine shares a request with it: {why}",
        f"decode-0: no prefill engine shares a request with it: {why}",
    ]


def test_a_pair_that_rests_shares_no_request():
    """Whatever made it rest."""
    registry = fleet(PREFILL, DECODE)
    registry.learn("decode-0", EngineCapabilities(resting=frozenset({"prefill-0"})))

    why = "decode-0 loads no KV of prefill-0"
    assert f"decode-0: no prefill engine shares a request with it: {why}" in texts(registry)
