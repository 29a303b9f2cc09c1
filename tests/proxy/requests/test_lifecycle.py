"""The table of a request's states: what is in it, and that nothing else is."""

import asyncio

import pytest

from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.requests.lifecycle import TRANSITIONS, RequestEvent, RequestState
from pdrelay_proxy.settings import Settings
from support.greedy import events
from support.scripted import JSON, Scripted, call, good_decode, prefilled, router_of


def test_every_state_has_a_row():
    """One that is missing would raise for each of its events."""
    assert set(TRANSITIONS) == set(RequestState)


def test_every_state_is_reached():
    """From the one in which a request begins."""
    found = set()
    to_see = {RequestState.RECEIVED}
    while to_see:
        state = to_see.pop()
        found.add(state)
        to_see |= set(TRANSITIONS[state].values()) - found

    assert found == set(RequestState)


def test_every_event_leads_somewhere():
    """One that no state knows is not needed."""
    assert {event for row in TRANSITIONS.values() for event in row} == set(RequestEvent)


@pytest.mark.parametrize("state", [state for state in RequestState if state is not RequestState.OVER])
def test_a_request_can_end_in_every_state(state):
    """At once: clients leave whenever they want."""
    assert TRANSITIONS[state][RequestEvent.END] is RequestState.OVER


def test_nothing_happens_to_a_request_that_is_over():
    """Whatever comes later is a bug."""
    assert TRANSITIONS[RequestState.OVER] == {}


class Walk:
    """One request by its engines, and the states in which they have found it."""

    def __init__(self, *decodes):
        self.seen = []
        self.client = None
        self._decodes = list(decodes)  # what the decode legs answer, one after the other

    def look(self, *_):
        state = self.client.request.state if self.client else None
        if state and (not self.seen or self.seen[-1] is not state):
            self.seen.append(state)

    async def prefill(self, leg):
        self.look()
        return prefilled(leg, transfer_mode=self.mode)

    async def decode(self, leg):
        self.look()
        answer = self._decodes.pop(0) if self._decodes and self.client else await good_decode(leg)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def served(self, asked=None, *, mode="pull", **options):
        """Serve a first request, that teaches the router where the prefill engine is, and the one that is looked at."""
        self.mode = mode
        router = router_of(Scripted(self.prefill, self.decode), 2, 2, **options)
        for name in "ab":
            await router.serve(name=name)
        self.client = router.start(asked, name="r")
        self.look()
        self.client.response.on_write = self.look
        await self.client.end()
        self.look()
        assert router.is_idle()
        return [state.name for state in self.seen]


async def test_a_pulled_request_walks_the_table():
    assert await Walk().served() == ["PREFILLING", "DECODING", "STREAMING", "OVER"]


async def test_a_pushed_request_walks_the_table():
    assert await Walk().served(mode="push") == ["BOTH", "STREAMING", "OVER"]


async def test_a_request_for_one_engine_walks_the_table():
    assert await Walk().served(call(n=2)) == ["DECODING", "STREAMING", "OVER"]


async def test_a_retry_begins_anew():
    """With the state of its first leg."""
    seen = await Walk((500, [b"{}"], JSON)).served()

    assert seen == ["PREFILLING", "DECODING", "PREFILLING", "DECODING", "STREAMING", "OVER"]


@pytest.mark.parametrize(("mode", "state"), [("pull", ["PREFILLING", "DECODING"]), ("push", ["BOTH"])])
async def test_another_decode_engine_changes_nothing(mode, state):
    """Where the first has got nothing of the request."""
    seen = await Walk(EngineError("down", reached=False)).served(mode=mode)

    assert seen == [*state, "STREAMING", "OVER"]


async def test_a_resumed_stream_is_decoded_once_more():
    """By one engine alone."""
    asked = {"stream": True, "temperature": 0, "max_tokens": 6}
    whole = [*events({"prompt": "hi"} | asked | {"return_token_ids": True}, name="x")]
    walk = Walk((200, [*whole[:3], EngineError("broke off")]), (200, whole))
    seen = await walk.served(call(**asked), resume_streams=True)

    assert seen == ["PREFILLING", "DECODING", "STREAMING", "DECODING", "STREAMING", "OVER"]
    assert walk.client.error is None


async def test_a_request_that_finds_no_place_waits():
    """And is routed when there is one."""
    walk = Walk()
    walk.mode = "pull"
    go = asyncio.Event()

    async def prefill(leg):
        await go.wait()
        return await walk.prefill(leg)

    router = router_of(
        Scripted(prefill, walk.decode), limits=Settings(max_concurrency=1, max_queue=1, max_queue_wait_s=5.0)
    )
    first = router.start(name="a")
    walk.client = router.start(name="b")
    walk.look()
    go.set()
    await first.end()
    await walk.client.end()
    walk.look()

    assert [state.name for state in walk.seen] == ["WAITING", "PREFILLING", "DECODING", "OVER"]
