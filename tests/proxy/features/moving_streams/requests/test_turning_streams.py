"""Requests while engines turn, drain, move their streams and die: each has an end, and says nothing that is wrong."""

import asyncio
import json
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.model import Api, EngineResponse, EngineRole, Role
from pdrelay_proxy.errors import CannotTurn, EngineError
from support.greedy import events, read
from support.scripted import Scripted, call, prefilled, request_id, router_of
from support.searching import examples

BODY = {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
ENGINES = 4
NUMBERS = st.integers(0, ENGINES - 1)
EVENTS = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from([Api.COMPLETIONS, Api.CHAT]), st.integers(2, 24)),
    st.tuples(st.just("turn"), NUMBERS, st.sampled_from(EngineRole)),
    st.tuples(st.just("turn"), NUMBERS, st.sampled_from(EngineRole)),
    st.tuples(st.sampled_from(["drain", "move", "undrain", "kill", "revive"]), NUMBERS),
    st.tuples(st.just("settle"), st.sampled_from([1.0, 70.0, 130.0])),
    st.tuples(st.just("go on"), st.integers(1, 20)),
)


class Fleet(Scripted):
    """Engines of both roles that send a token when they may, and the router before them."""

    def __init__(self, *, pushes):
        super().__init__(self._prefill, self._decode)
        self.pushes = pushes
        self.router = router_of(self, 0, 0, resume_streams=True, retries=4)
        self.registry, self.dead, self.tokens, self.now = self.router.registry, set(), 0, 0.0
        self.wrong = []
        for number in range(ENGINES):
            role = Role.PREFILL if number < ENGINES // 2 else Role.DECODE
            one = self.registry.add(role, Address("http", "h", number + 1))
            self.registry.learn(one.id, EngineCapabilities(engine_id=f"engine of {one.id}"))
        self.names = [member.instance.id for member in self.registry.members()]

    async def post(self, leg, *, timeout_s):
        return EngineResponse(400, "application/json", b"{}")

    def _comes(self, leg):
        member = self.registry.member(leg.instance.id)
        if not member.role.serves(leg.instance.role):
            self.wrong.append(f"a {leg.instance.role} leg at {leg.instance.id}, which serves {member.role}")
        if leg.instance.id in self.dead:
            raise EngineError("dead", reached=False)

    async def _prefill(self, leg):
        self._comes(leg)
        mode = "push" if self.pushes else "pull"
        return prefilled(leg, engine=f"engine of {leg.instance.id}", transfer_mode=mode)

    async def _decode(self, leg):
        self._comes(leg)
        params = json.loads(leg.body).get("kv_transfer_params") or {}
        if params.get("remote_engine_id") == f"engine of {leg.instance.id}":
            self.wrong.append(f"{leg.instance.id} reads from itself")
        parts = events(json.loads(leg.body), name=f"cmpl-{request_id(leg)}")
        return 200, [self._part(leg, part) for part in parts]

    async def _part(self, leg, part):
        while self.tokens <= 0:
            await asyncio.sleep(0)
            if leg.instance.id in self.dead:
                raise EngineError("dead")
        self.tokens -= 1
        return part

    async def happen(self, event):
        """Let something happen to an engine, or to all."""
        verb, what, *more = event
        name = self.names[what] if verb not in ("settle", "go on", "begin") else ""
        match verb:
            case "turn":
                with suppress(CannotTurn):
                    self.registry.departures.check_role_change(name, more[0])
                    self.registry.departures.change_role(name, more[0], now=self.now)
            case "drain" | "move":
                self.registry.departures.drain(name, now=self.now, moves=verb == "move")
            case "undrain":
                self.registry.departures.undrain(name, now=self.now)
            case "kill":
                self.dead.add(name)
            case "revive":
                self.dead.discard(name)
            case "settle":
                self.now += what
                self.registry.settle(patience_s=60, now=self.now)
            case "go on":
                self.tokens = what
        for _ in range(10):
            self.router.moves.cut_streams()
            await asyncio.sleep(0)


async def scene(plan, *, pushes):
    """Let all of it happen, then let everything end; return the fleet and what clients have asked and got."""
    fleet = Fleet(pushes=pushes)
    clients = []
    for event in plan:
        if event[0] == "begin":
            asked = BODY | {"max_tokens": event[2]}
            asked |= (
                {"prompt": "hi"} if event[1] is Api.COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
            )
            clients.append((fleet.router.start(call(event[1], **asked), f"r{len(clients)}"), asked))
        await fleet.happen(event)
    fleet.dead.clear()
    fleet.tokens = 10**9
    for client, _ in clients:
        await client.end()
    fleet.now += 1000.0
    for _ in range(3):
        fleet.registry.settle(patience_s=60, now=fleet.now)
        fleet.now += 100.0
    return fleet, clients


@given(st.lists(EVENTS, max_size=40), st.booleans())
@settings(max_examples=examples(80), deadline=None)
def test_whatever_happens_in_whatever_order(plan, pushes):
    """No request without an end, none wrong, none at an engine of the other side, nothing held, no turn for ever."""
    fleet, clients = asyncio.run(scene(plan, pushes=pushes))

    for number, (client, asked) in enumerate(clients):
        whole = read(b"".join(events(asked, name=f"cmpl-r{number}")))
        if client.status != 200:
            assert client.error is not None
            continue
        got = read(client.got)
        assert whole[0].startswith(got[0])
        if client.error is None:
            assert (got[0], *got[2:], len(got[1])) == (whole[0], *whole[2:], 1)
    # The last resort of a stream is the engine that it has left.
    came_back = {move.source for client, _ in clients for move in client.record.moves}
    assert [each for each in fleet.wrong if not any(name in each for name in came_back)] == []
    assert not fleet.open
    assert fleet.router.is_idle()
    assert [member.turn for member in fleet.registry.members() if member.turn is not None] == []
