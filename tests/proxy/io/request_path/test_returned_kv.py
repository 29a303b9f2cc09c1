"""Which decode engine a prefill engine is told of, and how."""

import json
from dataclasses import replace

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Api, GenerationRequest, RequestId, Role, RoutingHints, TransferId
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.protocol.returned_kv import CachedOn
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.request_path.policies import fleet_of
from pdrelay_proxy.io.request_path.returned_kv import LEAST, cached_on
from pdrelay_proxy.requests.leg_bodies import prefill_body
from pdrelay_proxy.settings import PolicyName, Settings

STICKY = Settings(decode_policy=PolicyName.PREFIX, return_kv=True)
MESSAGES = [{"role": "user", "content": "a long question " * 60}, {"role": "user", "content": "and another one " * 60}]
FIRST, LATER = (json.dumps(MESSAGES[:number]).encode() for number in (1, 2))


@pytest.fixture
def fleet():
    registry = Registry(STICKY)
    for role in Role:
        for port in (1, 2):
            registry.add(role, Address("http", "h", port))
    fleet = fleet_of(STICKY, registry, PushCoordinates(at_once=False), lambda: 0.0, lambda n: 0)
    for place, instance in enumerate(fleet.known(Role.DECODE)):
        registry.learn(instance.id, EngineCapabilities(engine_id=f"d{place}"))
    return fleet


def hints(prompt):
    return RoutingHints("m", None, prompt)


def has(fleet, place, prompt):
    fleet.caches.answered(fleet.known(Role.DECODE)[place], hints(prompt), 0)


def test_the_engine_with_most_of_the_prompt_is_named(fleet):
    has(fleet, 0, FIRST[:500])
    has(fleet, 1, FIRST)

    found = cached_on(fleet, hints(LATER))

    assert found.engine_id == "d1"
    assert 0.3 < found.share < 0.6


def test_an_engine_is_not_told_of_itself(fleet):
    """One that serves both roles may have the conversation as the decode engine that it is."""
    has(fleet, 1, FIRST)

    assert cached_on(fleet, hints(LATER), "prefill-0").engine_id == "d1"
    assert cached_on(fleet, hints(LATER), "decode-1") is None


def test_a_prompt_that_is_on_its_way_does_not_count(fleet):
    """An engine that was sent a prompt a moment ago has no answer to it."""
    fleet.caches.sent(fleet.known(Role.DECODE)[0], hints(FIRST))

    assert cached_on(fleet, hints(LATER)) is None


@pytest.mark.parametrize("prompt", [b"", b'"short"', LATER])
def test_none_is_named_that_is_not_known_to_have_any(fleet, prompt):
    assert cached_on(fleet, hints(prompt)) is None


def test_little_is_not_worth_a_question(fleet):
    has(fleet, 0, FIRST[: LEAST // 2])

    assert cached_on(fleet, hints(LATER)) is None


def test_an_engine_without_a_known_id_is_not_named(fleet):
    """Its metrics were not read yet, or it has another connector."""
    member = fleet.registry.get(fleet.known(Role.DECODE)[0].id)
    member.facts = replace(member.facts, engine_id=None)
    has(fleet, 0, FIRST)

    assert cached_on(fleet, hints(LATER)) is None


def test_the_setting_needs_a_policy_that_remembers():
    settings = Settings(return_kv=True)

    with pytest.raises(ConfigError, match="return_kv needs decode_policy prefix"):
        fleet_of(settings, Registry(settings), PushCoordinates(at_once=False), lambda: 0.0, lambda n: 0)


@pytest.mark.parametrize("api", [Api.COMPLETIONS, Api.CHAT, Api.GENERATE])
def test_the_prefill_leg_names_the_engine(api):
    """Beside what it says without, and in that leg alone."""
    call = GenerationRequest(api, parse(b'{"model":"m","prompt":"hi"}'), ())

    def params(**options):
        body = b"".join(prefill_body(call, RequestId("r"), TransferId("t"), reuses=False, **options))
        return json.loads(body)["kv_transfer_params"]

    named = params(cached_on=CachedOn('d"1', 0.5))

    assert named == params() | {"pdrelay_cached_on": 'd"1', "pdrelay_cached_share": 0.5}
