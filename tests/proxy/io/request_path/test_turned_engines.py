"""What policies know of an engine that has turned: what is in its cache is true of its process, whatever it serves."""

import json

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import EngineRole, Role, RoutingHints
from pdrelay_proxy.core.schemas import Coordinates
from pdrelay_proxy.features import feature_policies
from pdrelay_proxy.io.request_path.policies import fleet_of
from pdrelay_proxy.settings import PolicyName, Settings
from support.feature_routing import routing_of_features

PROMPT = json.dumps([{"role": "user", "content": "a long question " * 60}]).encode()
PREFILL, DECODE, BOTH = EngineRole


def fleet(policy, learned=None):
    settings = Settings(prefill_policy=policy, decode_policy=policy)
    registry = Registry(settings)
    for role in Role:
        for number in range(3):
            registry.add(role, Address("http", f"{role[0]}{number}", 80))
    learned = PushCoordinates(at_once=True) if learned is None else learned
    added = routing_of_features(settings, registry, lambda: 0.0)
    return fleet_of(settings, registry, learned, lambda: 0.0, lambda n: 0, added=added)


def turn(fleet, name, to):
    fleet.registry.departures.change_role(name, to, now=0.0)
    fleet.registry.settle(patience_s=0, now=0.0)
    assert fleet.registry.member(name).role is to


def as_role(fleet, name, role):
    return fleet.registry.member(name).as_role(role)


def hints(**more):
    return RoutingHints("m", **{"prompt": PROMPT} | more)


@pytest.mark.parametrize("policy", [PolicyName.PREFIX, *feature_policies()])
def test_its_prefix_cache_is_remembered(policy):
    """A conversation that it has goes to it as a prefill engine, too; and back, when it turns back."""
    found = fleet(policy)
    found.caches.answered(as_role(found, "decode-1", Role.DECODE), hints(), 0)
    before = found.caches.matched(as_role(found, "decode-1", Role.DECODE), hints())
    turn(found, "decode-1", PREFILL)

    assert found.caches.matched(as_role(found, "decode-1", Role.PREFILL), hints()) == before > 0
    assert found.any_pair(hints())[0].id == "decode-1"
    turn(found, "decode-1", DECODE)
    assert found.any_pair(hints())[1].id == "decode-1"


def test_sessions_go_elsewhere_and_come_back():
    """Those of other engines stay where they are."""
    found = fleet(PolicyName.SESSION)
    sessions = [f"session {number}" for number in range(40)]
    before = {one: found.any_pair(hints(session=one))[1].id for one in sessions}
    turn(found, "decode-1", PREFILL)
    during = {one: found.any_pair(hints(session=one))[1].id for one in sessions}
    turn(found, "decode-1", DECODE)

    assert {during[one] for one in sessions} == {"decode-0", "decode-2"}
    assert all(during[one] == before[one] for one in sessions if before[one] != "decode-1")
    assert {one: found.any_pair(hints(session=one))[1].id for one in sessions} == before


def test_where_it_pushes_from_is_known_when_it_is_a_prefill_engine_again():
    """Its id and its port are those of the process; one that was restarted is noticed as any other."""
    learned = PushCoordinates(at_once=True)
    found = fleet(PolicyName.ROUND_ROBIN, learned)
    told = Coordinates(remote_engine_id="e", remote_host="h", remote_port=1, tp_size=1)
    learned.learn("prefill-1", told)
    turn(found, "prefill-1", DECODE)
    turn(found, "prefill-1", PREFILL)

    assert learned.coordinates("prefill-1") == told
