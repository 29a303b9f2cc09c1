"""A request for several answers to one prompt is split where a decode engine loads the prompt once for all of them."""

import msgspec
import pytest

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.model import Role
from support.scripted import DONE, EVENT, Scripted, call, good_decode, pulled_prefill, router_of


async def legs_of(connectors, **fields):
    """Return the bodies that the engines of each role got; ``connectors``: of the decode engines, as they show."""
    engines = Scripted(pulled_prefill, good_decode)
    router = router_of(engines, y=len(connectors))
    for instance, connector in zip(router.registry.known(Role.DECODE), connectors, strict=True):
        router.registry.learn(instance.id, EngineCapabilities(connector=connector))
    client = await router.serve(call(**fields))
    assert client.body == EVENT + DONE
    return [[msgspec.json.decode(leg.body) for leg in engines.of(role)] for role in Role]


async def test_our_connector_shares_a_load():
    """The prefill engine makes one sequence, and the decode engine all."""
    prefills, decodes = await legs_of(["pdrelay", "pdrelay"], n=3)

    assert [leg["n"] for leg in prefills] == [1]
    assert [leg["n"] for leg in decodes] == [3]
    assert decodes[0]["kv_transfer_params"]


@pytest.mark.parametrize("connectors", [["nixl"], [None], ["pdrelay", "nixl"]])
async def test_another_connector_does_not(connectors):
    """Its second answer would read blocks that are free, and may be another request's."""
    prefills, decodes = await legs_of(connectors, n=3)

    assert prefills == []
    assert "kv_transfer_params" not in decodes[0]


async def test_what_is_odd_besides_is_not_split():
    """Such as a limit of one token."""
    prefills, _ = await legs_of(["pdrelay"], n=3, max_tokens=1)

    assert prefills == []
