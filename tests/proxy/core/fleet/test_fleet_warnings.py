"""What is wrong with a fleet as a whole, in sentences."""

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.fleet_warnings import FleetWarnings
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role


def fleet(prefill, decode):
    """A registry with engines of these facts, all of which answer probes."""
    registry = Registry()
    for role, some in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for port, facts in enumerate(some, start=1):
            name = registry.add(role, Address("http", "h", port)).id
            registry.learn(name, facts)
            registry.member(name).life.seen(now=0.0)
    return registry


def serving(*models, adapters=(), **facts):
    return EngineCapabilities(frozenset({*models, *adapters}), adapters=frozenset(adapters), **facts)


def warned(registry):
    warnings = FleetWarnings()
    warnings.update(registry)
    return list(warnings.texts)


def test_a_model_of_one_role_alone_is_said():
    """Everything looks healthy, and one model is refused while the other is served without a prefill engine."""
    assert warned(fleet([serving("tiny")], [serving("other")])) == [
        "prefill-0: no decode engine serves tiny, so requests for it are refused",
        "decode-0: no prefill engine serves other, so requests for it are not split",
    ]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ([serving("a")], [serving("a"), serving("embedder")]),  # a decode engine may be meant to serve alone
        ([serving("a", "b")], [serving("b")]),
        ([serving("a", adapters=["x"])], [serving("a")]),
        ([serving("a")], [serving("b"), EngineCapabilities()]),  # it has not said yet, and may be of a
        ([serving("a")], []),  # /health says that already
        ([], [serving("a")]),
    ],
)
def test_what_may_be_meant_like_this_is_no_warning(prefill, decode):
    """Operators who are told of what is right read nothing of what is wrong."""
    assert warned(fleet(prefill, decode)) == []


def test_engines_of_one_model_are_named_together():
    """There may be thousands of them, and as many names."""
    said = warned(fleet([serving(*[f"m{n:02}" for n in range(30)])] * 20, [serving("x")]))[0]

    assert said.startswith("prefill-0, prefill-1, ")
    assert ", and 4 more: no decode engine serves m00, m01, " in said
    assert said.endswith(", and 20 more, so requests for it are refused")


def test_engines_that_were_started_for_the_other_role_are_said():
    """The client would get 502, and then every request by one engine alone."""
    consumer, producer = EngineCapabilities(kv_role="kv_consumer"), EngineCapabilities(kv_role="kv_producer")
    both = EngineCapabilities(kv_role="kv_both")
    swapped = ": prefill and decode engines seem to be swapped"
    first = "prefill-0 is a prefill engine that was started with kv_role kv_consumer, so it hands no KV cache over"
    second = "decode-0 is a decode engine that was started with kv_role kv_producer, so it loads no KV cache"

    assert warned(fleet([consumer], [producer])) == [first + swapped, second + swapped]
    assert warned(fleet([consumer], [both])) == [first]
    assert warned(fleet([both], [producer])) == [second]
    assert warned(fleet([producer, both], [consumer, both])) == []


@pytest.mark.parametrize("role", Role)
def test_one_engine_under_two_addresses_gets_one_share(role):
    """127.0.0.1 and localhost, say. Where the first does not answer, the other one serves: it may have moved."""
    facts = [EngineCapabilities(engine_id="e"), EngineCapabilities(engine_id="e"), EngineCapabilities(engine_id="f")]
    registry = fleet(*([facts, [EngineCapabilities()]] if role is Role.PREFILL else [[EngineCapabilities()], facts]))
    said = f"{role}-1 is {role}-0 under another address (one engine_id): {role}-0 alone gets requests"

    assert [one.id for one in registry.usable(role)] == [f"{role}-0", f"{role}-2"]
    assert warned(registry) == [said]

    for _ in range(2):
        registry.member(f"{role}-0").life.missed("cannot be reached", now=1.0)
    assert [one.id for one in registry.usable(role, now=1.0)] == [f"{role}-1", f"{role}-2"]
    assert warned(registry) == []

    registry.member(f"{role}-0").life.seen(now=2.0)
    registry.remove(f"{role}-0", now=2.0)
    assert [one.id for one in registry.usable(role, now=2.0)] == [f"{role}-1", f"{role}-2"]
    assert warned(registry) == []


@pytest.mark.parametrize(
    "others",
    [
        {"engine_id": "e", "started": "1.7e9"},  # another process, which was given the same id by mistake
        {"engine_id": "f"},
        {"engine_id": None},
    ],
)
def test_two_engines_are_two(others):
    """Each has its own share."""
    registry = fleet([EngineCapabilities()], [EngineCapabilities(engine_id="e"), EngineCapabilities(**others)])

    assert len(registry.usable(Role.DECODE)) == 2
    assert warned(registry) == []


def test_ranks_behind_one_address_have_one_engine_id():
    """Each is an instance of its own."""
    registry = Registry()
    for rank in range(2):
        name = registry.add(Role.DECODE, Address("http", "h", 1), rank=rank).id
        registry.learn(name, EngineCapabilities(engine_id="e"))

    assert len(registry.usable(Role.DECODE)) == 2


def test_a_warning_is_news_once_and_shown_while_it_is_true():
    """The log says it once; a row says what is wrong with its engine."""
    registry = fleet([serving("tiny")], [serving("other")])
    warnings = FleetWarnings()

    assert warnings.update(registry) == warnings.texts
    assert warnings.update(registry) == []
    assert warnings.for_engine("decode-0") == warnings.texts[1]
    registry.learn("decode-0", serving("tiny"))
    assert warnings.update(registry) == []
    assert (warnings.texts, warnings.for_engine("decode-0")) == ([], None)
