"""Streams that move (features.moving_streams), and what is known of pairs."""

import asyncio
import json

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.peer_metrics import PairFailure
from pdrelay_proxy.core.model import EngineResponse, Role
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.features.pairs.core.pair_health import PairState
from support.greedy import events, read
from support.scripted import Scripted, call, params_of, prefilled, pulled_prefill, request_id, router_of, until

BODY = {"stream": True, "temperature": 0, "max_tokens": 24, "stream_options": {"include_usage": True}, "prompt": "hi"}


class Engines(Scripted):
    """Some streams stop behind eight events until they are let go; blocks are freed when it is asked."""

    def __init__(self, prefill=pulled_prefill, stops_at=0):
        """``stops_at``: which stream stops."""
        super().__init__(prefill, self._decode)
        self.go_on = asyncio.Event()
        self.sent = 0
        self.stops_in = stops_at

    async def post(self, leg, *, timeout_s):
        return EngineResponse(400, "application/json", b"{}")

    async def _decode(self, leg):
        stream = [*events(json.loads(leg.body), name=f"cmpl-{request_id(leg)}", per_event=1)]
        self.stops_in -= 1
        if self.stops_in != -1:
            return 200, stream
        return 200, [*stream[:8], self._wait(), *stream[8:]]

    async def _wait(self):
        self.sent = 8
        await self.go_on.wait()
        return b": nothing\n\n"


def whole():
    """What a client should have read at the end."""
    return read(b"".join(events(BODY, name="cmpl-r")))


def cut(router, name):
    """Drain a decode engine whose streams are to move."""
    router.registry.departures.drain(name, now=0.0, moves=True)
    router.moves.cut_streams()


async def test_a_pair_of_decode_engines_that_has_rested_is_tried_by_a_stream_that_moves():
    """No request goes to it otherwise: after some failures it would rest for ever, and each move take a prefill."""
    now = [0.0]
    engines = Engines()
    router = router_of(engines, 1, 2, resume_streams=True, clock=lambda: now[0])
    registry = router.registry
    lenders = []
    history = router.fleet.pair_history
    history.health.failed(("decode-0", "decode-1"), PairFailure.TRANSFER, 3, now=0.0)
    history._settle("decode-1")
    for number in range(3):
        registry.departures.undrain("decode-0", now=now[0])
        registry.departures.drain("decode-1", now=now[0])
        client = router.start(call(**BODY), f"r{number}")
        await until(lambda: engines.sent)
        engines.sent = 0
        registry.departures.undrain("decode-1", now=now[0])
        cut(router, "decode-0")
        await client.end()
        assert read(client.body)[0] == whole()[0]
        lenders.append(engines.of(Role.PREFILL)[-1].instance.id)
        now[0] += 31.0  # the rest is over; the last one begins while the trial has shown nothing
        engines.stops_in = 0

    assert lenders == ["prefill-0", "decode-0", "prefill-0"]
    assert history.health.get(("decode-0", "decode-1")).state is PairState.TRYING


async def test_a_move_over_an_engine_that_pulls_and_pushes_teaches_nothing():
    """Asked to lend, it lends: the router must still know from where it pushes."""

    async def prefill(leg):
        pushes = params_of(leg).get("transfer_mode") == "push"
        return prefilled(leg) if pushes else await pulled_prefill(leg)

    engines = Engines(prefill, stops_at=3)
    router = router_of(engines, 1, 2, resume_streams=True)
    registry = router.registry
    modes = list[str]()
    for member in registry.members():
        kv_role = "kv_consumer" if member.as_role(Role.DECODE) else None
        registry.learn(member.instance.id, EngineCapabilities(mode=EngineMode.AUTO, kv_role=kv_role))
    registry.departures.drain("decode-1", now=0.0)
    for number in range(3):
        modes.append((await router.serve(call(**BODY), f"before{number}")).record.mode)
    client = router.start(call(**BODY))
    await until(lambda: engines.sent)
    modes.append(client.request.record.mode)
    registry.departures.undrain("decode-1", now=0.0)
    cut(router, "decode-0")
    await client.end()
    for number in range(4):
        modes.append((await router.serve(call(**BODY), f"after{number}")).record.mode)

    assert read(client.body) == whole()
    assert engines.legs[-10].instance.id == "prefill-0"
    assert modes == ["pull", "push_cold", "pull", "push", "pull", "push", "pull", "push"]
