"""Quotas count the tokens of a stream by its usage, also where its client did not ask for it."""

import json

import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.settings import Settings
from support.scripted import DONE, Scripted, call, pulled_prefill, router_of

COUNTS = Settings(max_key_tokens_per_minute=1_000_000)
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":8}}\n\n'
# four tokens an event: drafts were accepted
EVENTS = [b'data: {"id":"x","choices":[{"index":0,"text":"a b c d"}],"usage":null}\n\n'] * 2


class Engine:
    """A decode engine that adds the usage to its streams where it is asked to, or always."""

    def __init__(self, *, forces=False, at_once=False):
        self.forces = forces
        self.at_once = at_once  # in one write
        self.options = []

    async def __call__(self, leg):
        options = json.loads(leg.body).get("stream_options") or {}
        self.options.append(options)
        adds = self.forces or options.get("include_usage") in (True, "yes")
        parts = [*EVENTS, *[USAGE] * adds, DONE]
        return 200, [b"".join(parts)] if self.at_once else parts


async def served(engine, *, count=3, limits=COUNTS, **fields):
    """Return what the last of some requests has got, and the tokens that it cost."""
    router = router_of(Scripted(pulled_prefill, engine), limits=limits)
    for number in range(count):
        before = charged(router)
        client = await router.serve(call(stream=True, **fields), f"r{number}")
    return client.body, charged(router) - before


def charged(router):
    """Return the tokens that all clients were charged; the router's time stands still."""
    return sum(account.quota._used for account in router.gate.admission._accounts.values())


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"continuous_usage_stats": True}])
async def test_a_stream_costs_its_tokens_and_shows_no_usage_that_nobody_asked_for(options, at_once):
    """By its events it would cost a quarter."""
    engine = Engine(at_once=at_once)
    body, cost = await served(engine, stream_options=options)

    assert body == b"".join([*EVENTS, DONE])
    assert cost == 3 + 8
    assert engine.options[-1] == (options or {}) | {"include_usage": True, "continuous_usage_stats": False}


@pytest.mark.parametrize("no", [0, "false"])
@pytest.mark.parametrize("yes", [1, "True"])
async def test_what_vllm_takes_for_yes_and_no_makes_no_stream_cheaper(yes, no):
    """Pydantic reads numbers and words as well."""
    engine = Engine()
    router = router_of(Scripted(pulled_prefill, engine), limits=COUNTS)
    await router.serve(call(stream=True), "r0")
    client = await router.serve(call(stream=yes, stream_options={"include_usage": no}), "r1")

    assert client.body == b"".join([*EVENTS, DONE])
    assert engine.options[-1]["include_usage"] is True


@pytest.mark.parametrize("stream", [False, 0, "no", None])
async def test_what_is_no_stream_is_not_asked_for_the_usage_of_one(stream):
    """vLLM would refuse it."""
    engine = Engine()
    router = router_of(Scripted(pulled_prefill, engine), limits=COUNTS)
    await router.serve(call(stream=True), "r0")
    await router.serve(call(stream=stream), "r1")

    assert engine.options[-1] == {}


@pytest.mark.parametrize("yes", [True, 1, "yes"])
async def test_a_client_that_asks_for_the_usage_has_it(yes):
    """As it asked."""
    options = {"include_usage": yes}
    engine = Engine()
    body, cost = await served(engine, stream_options=options)

    assert body == b"".join([*EVENTS, USAGE, DONE])
    assert cost == 3 + 8
    assert engine.options == [options] * 3


@pytest.mark.parametrize("options", [{"include_usage": "abc"}, {"include_usage": 2}, {"continuous_usage_stats": []}])
async def test_options_that_vllm_refuses_are_left_to_it(options):
    """A client's mistake has the same answer with quotas and without."""
    engine = Engine()
    await served(engine, stream_options=options)

    assert engine.options == [options] * 3


async def test_the_usage_of_engines_that_always_add_it_is_not_hidden():
    """vLLM's --enable-force-include-usage: somebody bills clients by it."""
    engine = Engine(forces=True)
    body, cost = await served(engine)

    assert body == b"".join([*EVENTS, USAGE, DONE])
    assert cost == 3 + 8
    assert engine.options == [{}] * 3


async def test_without_quotas_nobody_asks():
    """Nothing is looked at then."""
    engine = Engine()
    body, cost = await served(engine, limits=None)

    assert body == b"".join([*EVENTS, DONE])
    assert cost == 0
    assert engine.options == [{}] * 3


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_stream_that_could_be_resumed_hides_it_too(resumes):
    """There each event is read and written anew."""
    engine = Engine()
    router = router_of(Scripted(pulled_prefill, engine), limits=COUNTS, resume_streams=resumes)
    for number in range(2):
        client = await router.serve(call(stream=True, temperature=0), f"r{number}")

    assert engine.options[-1]["include_usage"]
    assert b'"usage":{' not in client.body
    assert client.body.endswith(DONE)


@pytest.mark.parametrize("prompts", [["x", "y"], ["x"]])
async def test_an_array_of_prompts_shows_no_usage_that_nobody_asked_for(prompts):
    """The parts' usages make one."""
    engine = Engine()
    router = router_of(Scripted(pulled_prefill, engine), limits=COUNTS)
    for number in range(3):
        client = await router.serve(call(Api.COMPLETIONS, stream=True, prompt=prompts, max_tokens=9), f"r{number}")

    assert b'"usage":{' not in client.body
    assert client.body.endswith(DONE)
