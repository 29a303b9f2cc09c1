"""Which model the engines serve."""

import asyncio
import json

import pytest

from pdrelay_proxy.api.model_list import ModelCatalog
from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import EngineResponse, Instance, InstanceId, Role
from pdrelay_proxy.errors import EngineError, NoInstance, NotAccepted

HEADERS = ((b"authorization", b"k"),)


def listing(*ids, status=200):
    data = ",".join(f'{{"id":"{one}","max_model_len":9}}' for one in ids)
    return EngineResponse(status, "application/json", f'{{"object":"list","data":[{data}]}}'.encode())


TRIES = 16  # engines of one set that are asked before it counts as gone


class Engines:
    """Answers for a port, or fails; remembers who was asked."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    async def models(self, instance, headers, *, bare=False):
        assert headers in (HEADERS, ())
        self.asked.append(instance.address.host + ("" if bare else " with a key"))
        await asyncio.sleep(0)
        answer = self.answers.get(instance.address.host)
        if answer is None:
            raise EngineError("down")
        return answer


def models(engines, *, prefill=(), decode=()):
    registry = Registry()
    for role, hosts in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for host in hosts:
            registry.add(role, Address("http", host, 80))
    return ModelCatalog(registry, engines, lambda: 0.0)


def candidate(host):
    return Instance(InstanceId("candidate"), Role.DECODE, Address("http", host, 80))


async def test_the_models_of_all_engines_are_told_each_once():
    """Several models behind one router look like one server; the decode engine's description counts."""
    engines = Engines(b=listing("m", "lora"), p=listing("other", "m"), e=listing(status=500))
    answer = await models(engines, prefill="pe", decode="ab").listing()

    assert [card["id"] for card in json.loads(answer.body)["data"]] == ["m", "lora", "other"]
    assert json.loads(answer.body)["data"][0]["max_model_len"] == 9
    assert sorted(engines.asked) == [f"{one} with a key" for one in "abep"]


async def test_a_model_that_no_decode_engine_serves_is_not_listed():
    """Requests for it are refused; one of decode engines alone is served."""
    engines = Engines(p=listing("tiny", "m"), d=listing("other", "m"))
    catalog = models(engines, prefill="p", decode="d")
    learn = catalog._registry.learn
    learn("prefill-0", EngineCapabilities(frozenset({"tiny", "m"})))
    learn("decode-0", EngineCapabilities(frozenset({"other", "m"})))
    answer = await catalog.listing()

    assert [card["id"] for card in json.loads(answer.body)["data"]] == ["other", "m"]


async def test_a_refusal_is_an_answer():
    """A missing key is the client's business, when every engine says so."""
    refusal = EngineResponse(401, "application/json", b'{"error":"Unauthorized"}')

    assert await models(Engines(a=refusal, p=refusal), prefill="p", decode="a").listing() == refusal
    assert (await models(Engines(a=refusal, p=listing("m")), prefill="p", decode="a").listing()).status == 200


async def test_one_list_that_is_no_text_leaves_that_of_the_others_readable():
    """Clients would get none: JSON is UTF-8 (RFC 8259, 8.1), also where the router reads no more than names."""
    odd = EngineResponse(200, "application/json", b'{"data":[{"id":"m","root":null,"path":"/mod\xe8les"}]}')
    answer = await models(Engines(a=odd, p=listing("other")), prefill="p", decode="a").listing()

    assert [card["id"] for card in json.loads(answer.body)["data"]] == ["other"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "down"),
        (listing("m", status=503), "answers /v1/models with status 503, and names no model"),
        (listing(), "answers /v1/models with status 200, and names no model"),
        (EngineResponse(200, "application/json", b"<html>"), "names no model"),
        (EngineResponse(200, "application/json", b'{"data":[{"name":"m"}]}'), "names no model"),
        (EngineResponse(200, "application/json", b'{"data":7}'), "names no model"),
        (EngineResponse(200, "application/json", b'{"data":[' + b'{"id":"m"},' * 65_536 + b'{"id":"m"}]}'), "no model"),
    ],
)
async def test_what_does_not_answer_like_an_engine_is_not_accepted(answer, why):
    """It would fail every request it gets."""
    engines = Engines(x=answer) if answer else Engines()

    with pytest.raises(NotAccepted, match=why):
        await models(engines).accepted(candidate("x"), HEADERS)


async def test_an_added_engine_may_serve_another_model():
    """Requests go by the model that they name, so several may be behind one router."""
    engines = Engines(b=listing("m"), x=listing("other"))

    assert await models(engines, decode="ab").accepted(candidate("x"), HEADERS) == EngineCapabilities(
        frozenset({"other"}), adapters=frozenset()
    )


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_is_shown_only_to_an_engine_that_wants_one(status):
    """Who names an address of their own would get to see it."""
    engines = Engines(x=EngineResponse(status, "application/json", b'{"error":"Unauthorized"}'), y=listing("m"))
    ours = models(engines)

    with pytest.raises(NotAccepted, match=f"status {status}"):
        await ours.accepted(candidate("x"), HEADERS)
    assert (await ours.accepted(candidate("y"), HEADERS)).models == {"m"}
    assert engines.asked == ["x", "x with a key", "y"]


class Fleet:
    """Engines whose models are known, and a clock."""

    def __init__(self, *sets, **answers):
        """``sets``: of each decode engine."""
        self.now, self.registry, self.engines = 0.0, Registry(), Engines(**answers)
        for number, ids in enumerate(sets):
            facts = EngineCapabilities(models=ids and frozenset(ids))
            self.registry.add(Role.DECODE, Address("http", f"e{number}", 80), facts=facts)
            self.engines.answers.setdefault(f"e{number}", listing(*ids or ()))
        self.models = ModelCatalog(self.registry, self.engines, lambda: self.now)

    def kill(self, *numbers, noticed=True):
        for number in numbers:
            del self.engines.answers[f"e{number}"]
            life = self.registry.member(InstanceId(f"decode-{number}")).life
            life.seen(now=0.0)
            for _ in range(2 * noticed):
                life.missed("cannot be reached", now=0.0)

    async def ids(self):
        answer = await self.models.listing()
        return [card["id"] for card in json.loads(answer.body)["data"]]


async def test_a_large_fleet_is_not_asked_whole_for_each_call_of_a_client():
    """2,000 requests for one would be a weapon, and each dead engine would make the client wait."""
    fleet = Fleet(*[("m", "alias", "lora")] * 1000)
    fleet.kill(*range(99))
    fleet.kill(99, noticed=False)

    found = await asyncio.gather(*[fleet.ids() for _ in range(50)])
    assert found == [["m", "alias", "lora"]] * 50
    assert len(fleet.engines.asked) <= 4


async def test_engines_of_each_set_of_models_are_asked_and_those_that_are_not_known():
    """Clients choose among all of it; what has just been added has not been probed yet."""
    fleet = Fleet(*[("m",)] * 20, *[("m", "lora")] * 20, *[("other",)] * 20, None, e60=listing("new"))
    fleet.kill(*range(40, 60))

    assert await fleet.ids() == ["m", "lora", "new"]
    assert len(fleet.engines.asked) <= 2 + 1 + TRIES  # the 20 that are gone are of one set


async def test_a_list_is_kept_for_seconds_unless_what_engines_serve_changes():
    """Who asks often costs no more; who adds an engine sees its models."""
    fleet = Fleet(("m",), ("m",))
    await fleet.ids()
    fleet.now = 2.0
    await fleet.ids()
    asked = len(fleet.engines.asked)
    fleet.engines.answers |= {"e0": listing("m", "lora"), "x": listing("added")}
    fleet.now = 6.0
    later = await fleet.ids()
    fleet.registry.add(Role.DECODE, Address("http", "x", 80))

    assert (asked, later) == (1, ["m", "lora"])
    assert await fleet.ids() == ["m", "lora", "added"]


async def test_when_no_engine_answers_all_who_wait_are_told_at_once():
    """One after the other, each would wait for timeouts of its own; the next call may find an engine again."""
    fleet = Fleet(*[("m",)] * 100)
    fleet.kill(*range(100))
    found = await asyncio.gather(*[fleet.ids() for _ in range(20)], return_exceptions=True)
    asked = len(fleet.engines.asked)
    fleet.engines.answers["e1"] = listing("m")

    assert {type(one) for one in found} == {NoInstance}
    assert asked <= TRIES
    assert await fleet.ids() == ["m"]


async def test_engines_that_have_just_died_do_not_hide_those_that_live():
    """A rack is gone, and no probe has missed it yet: what others of the set serve is there all the same."""
    fleet = Fleet(*[("m",)] * 20)
    for number in range(10):
        del fleet.engines.answers[f"e{number}"]

    assert await fleet.ids() == ["m"]
