"""Engines whose every leg is a coroutine of the test; they know which legs are open."""

import json
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.dialect import parse
from xpyd_proxy.core.learned import Learned
from xpyd_proxy.core.model import Answer, Api, Call, Role
from xpyd_proxy.core.policies.round_robin import RoundRobin
from xpyd_proxy.core.ports import Unlimited
from xpyd_proxy.core.push import MANNERS
from xpyd_proxy.core.registry import Registry
from xpyd_proxy.core.rules import Rules
from xpyd_proxy.relay import Legs, Relay, Releaser
from xpyd_proxy.settings import Mode

EVENT, DONE = b'data: {"id":"x"}\n\n', b"data: [DONE]\n\n"


def request_id(leg):
    return dict(leg.headers)[b"x-request-id"].decode()


def params_of(leg):
    return json.loads(leg.body)["kv_transfer_params"]


def prefilled(leg, *, engine="e1", **changes):
    """The answer of a prefill engine that pushes."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": engine,
        "remote_request_id": f"cmpl-{request_id(leg)}-0-0123abcd",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 20,
        "transfer_mode": "push",
    }
    params = {name: value for name, value in (params | changes).items() if value is not None}
    return Answer(200, "application/json", json.dumps({"kv_transfer_params": params}).encode())


@dataclass
class Scripted:
    """What each side does with a leg: return, raise or wait. Streams of decode are (status, parts)."""

    prefill: object
    decode: object
    legs: list = field(default_factory=list)  # as they came
    open: list = field(default_factory=list)  # at this moment

    async def ask(self, leg, *, timeout_s):
        with self._open(leg):
            return await self.prefill(leg)

    @asynccontextmanager
    async def stream(self, leg, *, sent=lambda: None):
        with self._open(leg):
            sent()
            status, parts = await self.decode(leg)
            async with aclosing(_chunks(parts)) as chunks:  # read or not, the block closes it
                yield Streamed(status, chunks)

    async def models(self, instance, headers, *, bare=False):
        raise NotImplementedError

    def of(self, role):
        return [leg for leg in self.legs if leg.instance.role is role]

    @contextmanager
    def _open(self, leg):
        self.legs.append(leg)
        self.open.append(leg)
        try:
            yield
        finally:
            self.open.remove(leg)


@dataclass
class Streamed:
    status: int
    chunks: object
    content_type: str = "text/event-stream"


async def _chunks(parts):
    for part in parts:
        if isinstance(part, Exception):
            raise part
        yield part if isinstance(part, bytes) else await part


async def good_prefill(leg):
    return prefilled(leg)


async def good_decode(leg):
    return 200, [EVENT, DONE]


def relay_of(engines, x=1, y=1, *, retries=2, mode=Mode.AUTO, clock=lambda: 0.0, watchers=(), budget=None, **more):
    registry = Registry()
    for role, count in ((Role.PREFILL, x), (Role.DECODE, y)):
        for port in range(1, count + 1):
            registry.add(role, Address("http", "h", port))
    manner = MANNERS[mode]
    learned = Learned(at_once=manner.at_once)
    told = [one for one in watchers if hasattr(one, "released")]
    legs, releaser = (
        Legs(engines, clock, watchers, [w for w in watchers if hasattr(w, "differed")]),
        Releaser(engines, told),
    )
    rules = Rules(retries=retries, **more)
    return Relay(registry, legs, RoundRobin(), learned, manner, releaser, rules, budget=budget or Unlimited())


def call(api=Api.COMPLETIONS, **fields):
    prompt = {"prompt": "hi"} if api is Api.COMPLETIONS else {"messages": []}
    return Call(api, parse(json.dumps(prompt | fields).encode(), strip_private=False), ())
