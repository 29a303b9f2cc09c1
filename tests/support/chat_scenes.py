"""Random chats in memory: several at once, over engines with real prefix caches that evict, fail, restart and go away.

A scene is a list of rounds. In each, something happens to engines or to what clients remember, and then some chats have
a turn at the same time.
"""

import asyncio
import itertools
import json
import random
from dataclasses import dataclass, field

import httpx

from pdrelay_proxy.app import build
from pdrelay_proxy.core.model import Api, Role
from pdrelay_proxy.features.kv_events.core.event_stream import PATH
from pdrelay_proxy.features.kv_events.settings import KvEvents
from pdrelay_proxy.known_settings import with_values
from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.simulated.rules import expected_text, prompts_of, word_id
from support.sim import InMemory, sims, until_async

PREFILL, DECODE = ("p0", "p1"), ("d0", "d1")
CACHE_BLOCKS = 24  # of 16 tokens: two or three conversations
QUESTION, LONG = 24, 220  # tokens of a question
FIRST_ID, FILLER = 100, 50_000  # ids of clients' tokens, and of those that push others out of a cache
KEY = {"x-api-key": "sesame"}


@dataclass(frozen=True)
class Ask:
    """One turn of a chat; ``leaves``: the client hangs up behind so many pieces of the answer (None: it does not)."""

    chat: int
    streams: bool = True
    tokens: int = 4
    is_long: bool = False
    leaves: int | None = None


@dataclass
class Conversation:
    """What a client remembers: messages, or token ids."""

    number: int
    is_ids: bool
    history: list = field(default_factory=list)

    def question(self, dice, *, is_long):
        """Return a history with something new behind it."""
        length = LONG if is_long or not self.history else QUESTION
        if self.is_ids:
            return [*self.history, *(dice.randrange(FIRST_ID, FIRST_ID + 900) for _ in range(length))]
        text = f"{self.number} " + "".join(dice.choices("abcdefgh ", k=length))
        return [*self.history, {"role": "user", "content": text}]

    def answered(self, prompt, body):
        """Remember a prompt and its answer."""
        if self.is_ids:
            ids = [word_id(prompts_of(body)[0], place) for place in range(body["max_tokens"])]
            self.history = [*prompt, *ids]
        else:
            self.history = [*prompt, {"role": "assistant", "content": expected_text(body)}]

    def edit(self, dice):
        """Change something that was said, or forget what was said last."""
        if not self.history:
            return
        place = dice.randrange(len(self.history))
        if dice.random() < 0.5:
            del self.history[place:]
        elif self.is_ids:
            self.history[place] += 1
        else:
            self.history[place] = self.history[place] | {"content": self.history[place]["content"] + "!"}

    def body(self, prompt, ask):
        head = {"model": "sim", "max_tokens": ask.tokens, "temperature": 0, "cache_salt": str(self.number)}
        head |= {"stream": True, "stream_options": {"include_usage": True}} if ask.streams else {}
        return head | ({"prompt": prompt} if self.is_ids else {"messages": prompt})

    @property
    def api(self):
        return Api.COMPLETIONS if self.is_ids else Api.CHAT


class _Frames(httpx.AsyncByteStream):
    """The events of an engine, for as long as it is there."""

    def __init__(self, network, host):
        self._network, self._host = network, host

    async def __aiter__(self):
        cache = self._network.engines[self._host].cache
        async for frame in cache.frames():
            if self._host not in self._network.engines:
                raise httpx.ReadError("it has gone")
            yield frame


class Network(InMemory):
    """Events of caches come as they happen: httpx's transport for applications waits for the end of an answer."""

    async def handle_async_request(self, request):
        if request.url.path == PATH and request.url.host in self.engines:
            return httpx.Response(200, stream=_Frames(self, request.url.host))
        return await super().handle_async_request(request)


@dataclass
class Got:
    """What a client has of an answer."""

    ask: Ask
    body: dict
    status: int = 0
    data: bytes = b""
    is_over: bool = False

    def check(self):
        """Accept the right text, its beginning if the client has left or was told of an error, or an error."""
        assert self.is_over or self.ask.leaves is not None
        if self.status != 200:
            assert self.status in (0, 502, 503, 504), (self.status, self.data[:300])
            return False
        text, error, is_done = self._read()
        right = expected_text(self.body)
        is_whole = self.is_over and not error and is_done
        assert (text == right) if is_whole else right.startswith(text), (text, right, self.data[-300:])
        assert is_whole or error or self.ask.leaves is not None
        return is_whole

    def _read(self):
        if not self.ask.streams:
            if not self.is_over:
                return "", False, False
            choice = json.loads(self.data)["choices"][0]
            return choice["message"]["content"] if "message" in choice else choice["text"], False, True
        whole = self.data.decode().rpartition("\n\n")[0]
        lines = [line[6:] for line in whole.splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        choices = [choice for event in events for choice in event.get("choices", ())]
        text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
        return text, any("error" in event for event in events), lines[-1:] == ["[DONE]"]


@dataclass
class Scene:
    """A router, its engines, and clients with chats; ``settings``: what is not as always."""

    settings: dict
    seed: int

    def __post_init__(self):
        self.dice = random.Random(self.seed)
        self.engines = sims(len(PREFILL), len(DECODE), offers=True, cache_blocks=CACHE_BLOCKS)
        self.network = Network(dict(self.engines))
        given = {"prefill": tuple(f"{name}:80" for name in PREFILL), "decode": tuple(f"{name}:80" for name in DECODE)}
        given |= {"allowed_hosts": ("*",), "admin_key": "sesame", "retry_budget_ratio": 1.0}
        self.router = build(with_values(Settings(), given | self.settings), fabric=self.network.fabric)
        self.chats = [Conversation(number, is_ids=number % 2 == 0) for number in range(4)]
        self.fillers = itertools.count(FILLER)
        self.whole = 0  # turns that were answered whole
        self.lost = set()  # leases of engines that were restarted behind them, or have gone

    async def play(self, rounds):
        """Play all rounds, and check that all is as before."""
        async with self.network.running(self.router.app):
            for happenings, asks in rounds:
                for happens in happenings:
                    self.happen(*happens)
                for got in await asyncio.gather(*map(self.turn, asks)):
                    self.whole += got.check()
            self.calm()
            await self.settle()
            await self.check()
        for engine in self.engines.values():
            assert not engine.violations, engine.violations

    def happen(self, what, which, detail=None):
        """Do something to an engine, or to what a client remembers."""
        if what == "edit":
            self.chats[which].edit(self.dice)
        elif what == "evict":
            self.engines[which].cache.use([next(self.fillers) for _ in range(16 * detail)])
        elif what == "restart":
            self.lose(which)
            self.engines[which].restart()
        elif what == "fail":
            self.engines[which].inject(detail)
        elif what == "go":
            self.come_back()
            del self.network.engines[which]  # one at a time

    def come_back(self):
        """Have the engine again that has gone. Nobody could tell it anything of its leases: they run out."""
        for name in self.engines.keys() - self.network.engines:
            self.lose(name)
            self.network.engines[name] = self.engines[name]

    def lose(self, name):
        """Nobody can end the leases any more that an engine has granted."""
        self.lost.update(lease for lease, _ in self.engines[name].granted)

    def calm(self):
        """No engine fails any more."""
        self.come_back()
        for engine in self.engines.values():
            engine.inject(None)

    async def turn(self, ask):
        """Ask, and remember the answer if it is whole."""
        chat = self.chats[ask.chat]
        prompt = chat.question(self.dice, is_long=ask.is_long)
        body = chat.body(prompt, ask)
        got = Got(ask, body)
        await self._request(chat.api, got)
        if got.is_over and got.status == 200 and ask.leaves is None:
            chat.answered(prompt, body)
        return got

    async def _request(self, path, got):
        """Call the application as a server does, and hang up as clients do."""
        raw, left, pieces = json.dumps(got.body).encode(), asyncio.Event(), itertools.count(1)
        coming = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive():
            if coming:
                return coming.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if left.is_set():
                return
            if message["type"] == "http.response.start":
                got.status = message["status"]
            else:
                got.data += message.get("body", b"")
                got.is_over = not message.get("more_body", False)
            if not got.is_over and got.ask.leaves is not None and next(pieces) > got.ask.leaves:
                left.set()

        headers = [(b"host", b"router"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw))]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("router", 80), "state": {},
        }  # fmt: skip
        if got.ask.leaves == 0:
            asyncio.get_running_loop().call_later(0.002, left.set)  # before there is an answer
        async with asyncio.timeout(20):
            await self.router.app(scope, receive, send)

    async def settle(self):
        """Wait until the router is idle, and the engines have no request."""
        await until_async(lambda: not any(self.held().values()))
        await until_async(lambda: not any(entry.state == "open" for sim in self.engines.values() for entry in sim.log))
        await until_async(lambda: not self.unsettled())

    def held(self):
        """Return what the router holds of requests."""
        admission, registry = self.router.live.gate.admission, self.router.live.registry
        self.router.telemetry.later.settle()
        return {
            "requests": len(list(self.router.requests)),
            "in flight": self.router.lifetime.in_flight,
            "admitted": admission.admitted,
            "waiting": admission.waiting,
            "bytes": admission.held_bytes,
            "loads": sum(registry.get(one.id).load.in_flight for role in Role for one in registry.known(role)),
        }

    def unsettled(self):
        """Return the leases of which no engine has heard again: no leg with it, no release, no transfer abandoned."""
        heard, abandoned = set(self.lost), set()
        for name in DECODE:
            legs = (json.loads(entry.body).get("kv_transfer_params") or {} for entry in self.engines[name].log)
            heard.update(leg.get("remote_request_id") for leg in legs)
            heard.update(self.engines[name].released)
        for name in PREFILL:
            abandoned.update(self.engines[name].abandoned)
        granted = [each for name in PREFILL for each in self.engines[name].granted]
        return [lease for lease, transfer in granted if lease not in heard and transfer not in abandoned]

    async def check(self):
        """Whoever follows events knows what is cached; nothing is remembered beyond that."""
        if self.settings.get("kv_events") is not KvEvents.AUTO:
            return
        transport = httpx.ASGITransport(self.router.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router", headers=KEY) as client:
            await self._until_known(client)
            metrics = (await client.get("/metrics")).text
        sizes = [float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if "pdrelay_kv_index_blocks{" in line]
        assert len(sizes) == len(self.engines)
        assert max(sizes) <= CACHE_BLOCKS

    async def _until_known(self, client):
        async with asyncio.timeout(30):
            for chat in self.chats:
                if not chat.is_ids or not chat.history:
                    continue
                body = chat.body(chat.history, Ask(chat.number))
                question = {"path": chat.api.value, "body": body}
                while True:
                    answer = await client.post("/instances/explain", json=question)
                    # 400: the engines of a role are still ejected for what the scene has done to them.
                    assert answer.status_code in (200, 400), answer.text
                    if answer.json().get("cached_tokens") == self._cached(chat):
                        break
                    await asyncio.sleep(0.01)

    def _cached(self, chat):
        roles = {"p": "prefill", "d": "decode"}
        return {
            f"{roles[name[0]]}-{name[1:]}": sim.cache.has(chat.history, str(chat.number))
            for name, sim in self.engines.items()
        }


STICKY = {
    "prefill_policy": PolicyName.PREFIX,
    "decode_policy": PolicyName.PREFIX,
    "min_split_new_bytes": 200,
    "health_check_interval_s": 0.2,
}
