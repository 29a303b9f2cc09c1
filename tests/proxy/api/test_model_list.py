"""Which model the engines serve."""

import asyncio
import json

import pytest

from xpyd_proxy.api.model_list import ModelCatalog
from xpyd_proxy.core.address import Address
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import EngineResponse, Instance, InstanceId, Role
from xpyd_proxy.errors import EngineError

HEADERS = ((b"authorization", b"k"),)


def listing(*ids, status=200):
    data = ",".join(f'{{"id":"{one}","max_model_len":9}}' for one in ids)
    return EngineResponse(status, "application/json", f'{{"object":"list","data":[{data}]}}'.encode())


class Engines:
    """Answers for a port, or fails; remembers who was asked."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    async def models(self, instance, headers, *, bare=False):
        assert headers == HEADERS
        self.asked.append(instance.address.host + ("" if bare else " with a key"))
        await asyncio.sleep(0)
        answer = self.answers.get(instance.address.host)
        if answer is None:
            raise EngineError("down")
        return answer


def models(engines, *, prefill=(), decode=(), model=None):
    registry = Registry()
    for role, hosts in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for host in hosts:
            registry.add(role, Address("http", host, 80))
    return ModelCatalog(registry, engines, model=model)


def candidate(host):
    return Instance(InstanceId("candidate"), Role.DECODE, Address("http", host, 80))


async def test_the_models_of_all_engines_are_told_each_once():
    """Several models behind one router look like one server; the decode engine's description counts."""
    engines = Engines(b=listing("m", "lora"), p=listing("other", "m"), e=listing(status=500))
    answer = await models(engines, prefill="pe", decode="ab").listing(HEADERS)

    assert [card["id"] for card in json.loads(answer.body)["data"]] == ["m", "lora", "other"]
    assert json.loads(answer.body)["data"][0]["max_model_len"] == 9
    assert sorted(engines.asked) == [f"{one} with a key" for one in "abep"]


async def test_a_refusal_is_an_answer():
    """A missing key is the client's business, when every engine says so."""
    refusal = EngineResponse(401, "application/json", b'{"error":"Unauthorized"}')

    assert await models(Engines(a=refusal, p=refusal), prefill="p", decode="a").listing(HEADERS) == refusal
    assert (await models(Engines(a=refusal, p=listing("m")), prefill="p", decode="a").listing(HEADERS)).status == 200


@pytest.mark.parametrize(
    "answer",
    [
        None,
        listing("m", status=503),
        listing(),
        EngineResponse(200, "application/json", b"<html>"),
        EngineResponse(200, "application/json", b'{"data":[{"name":"m"}]}'),
        EngineResponse(200, "application/json", b'{"data":7}'),
    ],
)
async def test_what_does_not_answer_like_an_engine_is_not_accepted(answer):
    """It would fail every request it gets."""
    engines = Engines(x=answer) if answer else Engines()

    assert await models(engines).accepted(candidate("x"), HEADERS) is None


async def test_the_given_model_decides():
    """Nobody else is asked then, and only the first name of an engine counts."""
    engines = Engines(a=listing("other"), x=listing("m", "adapter"), y=listing("adapter", "m"))
    ours = models(engines, decode="a", model="m")

    assert await ours.accepted(candidate("x"), HEADERS) == {"m", "adapter"}
    assert await ours.accepted(candidate("y"), HEADERS) is None
    assert engines.asked == ["x", "y"]


async def test_without_one_an_engine_may_serve_another_model():
    """Requests go by the model that they name, so several may be behind one router."""
    engines = Engines(b=listing("m"), x=listing("other"))

    assert await models(engines, decode="ab").accepted(candidate("x"), HEADERS) == {"other"}


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_is_shown_only_to_an_engine_that_wants_one(status):
    """Who names an address of their own would get to see it."""
    engines = Engines(x=EngineResponse(status, "application/json", b'{"error":"Unauthorized"}'), y=listing("m"))
    ours = models(engines)

    assert await ours.accepted(candidate("x"), HEADERS) is None
    assert await ours.accepted(candidate("y"), HEADERS) == {"m"}
    assert engines.asked == ["x", "x with a key", "y"]
