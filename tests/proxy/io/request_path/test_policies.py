"""What the policies of the settings are made of."""

from collections import Counter

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import RequestId, Role, RoutingHints
from pdrelay_proxy.core.protocol.push import EngineMode, TransferMode
from pdrelay_proxy.core.routing.group_weights import EACH
from pdrelay_proxy.core.routing.share_bound import BURST
from pdrelay_proxy.io.request_path.policies import fleet_of
from pdrelay_proxy.settings import KvTransferMode, Settings
from support.feature_routing import routing_of_features


@pytest.mark.parametrize("least", [0, 4096], ids=["two engines", "one engine where it has the prompt"])
@pytest.mark.parametrize(
    "names",
    [("least_loaded", "session"), ("prefix", "least_loaded"), ("least_loaded", "prefix"), ("expected_ttft",) * 2],
)
def test_policies_that_follow_caches_and_sessions_are_bound_while_revisions_are_mixed(names, least):
    """One conversation with many requests at a time: all of them would go to one engine."""
    settings = Settings(prefill_policy=names[0], decode_policy=names[1])
    registry = Registry(settings)
    added = routing_of_features(settings, registry, lambda: 0.0)
    fleet = fleet_of(settings, registry, PushCoordinates(at_once=True), lambda: 0.0, lambda n: n // 2, added=added)
    for role in Role:
        for port in range(1, 9):
            facts = EngineCapabilities(revision=str(port % 2))
            registry.add(role, Address("http", role.value, port), facts=facts)
    counts = Counter()
    for number in range(400):
        ask = RoutingHints("m", "a" if "session" in names else None, b'"%s"' % (b"x" * 2000))
        reason, _ = fleet.any_small(ask, least) if number else (None, 0)
        chosen = (
            fleet.any_pair(ask, may_be_alone=True)
            if reason is None
            else (None, fleet.choose(fleet.usable(Role.DECODE), ask))
        )
        for one in chosen:
            if one is not None:
                fleet.enter(one, RequestId(str(number)))
                counts[one.id] += 1

    assert max(counts.values()) <= EACH * 400 / 8 + BURST + 1  # the first one finds it idle


@pytest.mark.parametrize(
    ("chosen", "way"),
    [
        (KvTransferMode.AUTO, TransferMode.PULL),  # as every connector can, while no feature finds out more
        (KvTransferMode.PULL, TransferMode.PULL),
        (KvTransferMode.PUSH, TransferMode.PUSH),
    ],
)
def test_the_setting_says_how_kv_moves_between_engines_that_leave_it_to_the_router(chosen, way):
    """``--kv-transfer-mode``: then nothing is tried."""
    settings = Settings(kv_transfer_mode=chosen)
    registry = Registry(settings)
    fleet = fleet_of(settings, registry, PushCoordinates(at_once=True), lambda: 0.0, lambda n: n // 2)
    prefill, decode = (registry.add(role, Address("http", role.value, 1)) for role in Role)
    assert fleet.mode_of(prefill, decode) is None
    registry.learn(prefill.id, EngineCapabilities(mode=EngineMode.AUTO))

    assert [fleet.mode_of(prefill, decode) for _ in range(8)] == [way] * 8
