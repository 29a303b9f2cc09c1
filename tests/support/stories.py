"""Stories of many clients and engines that fail: each answer is that of one engine to that body alone, or an error."""

import asyncio
import json
import logging
import random
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from pdrelay_proxy import listeners
from pdrelay_proxy.app import build
from pdrelay_proxy.core.admission.lifetime import Stage, Step
from pdrelay_proxy.core.model import Api, Role
from pdrelay_proxy.features.expected_ttft.settings import EXPECTED_TTFT
from pdrelay_proxy.features.first_token.settings import FirstTokenFrom
from pdrelay_proxy.known_settings import with_values
from pdrelay_proxy.settings import KvTransferMode, Settings
from support.engine_styles import drawn_style
from support.simulated_loop import SimulatedLoop
from support.story_answers import counted, read
from support.story_engines import Fate, Fleet, Saying, flat, limit_of, next_tokens, prompts_of

DEATHS = ("status", "cut", "cut", "cut", "stall", "error", "abort")
WORDS = ("once", "upon a time", "ä<é", "there was a model", "of few words")


@dataclass
class Ask:
    """A client's request, and what it does with the answer."""

    api: Api
    body: dict
    leaves_at: float | None = None
    pause_s: float = 0.0  # between its reads
    method: str = "POST"
    sender: str | None = None  # whose key it has
    mistake: int | None = None  # the status that its client's own mistake gets
    is_begun: bool = False  # some of the answer has come


def plain_ask(dice):
    """Draw a stream with which another engine can go on."""
    words = " ".join(dice.choices(WORDS, k=dice.randrange(1, 5)))
    body = {"model": "m", "stream": True, "temperature": dice.choice((0, 0, 0.7)), "max_tokens": dice.choice((9, 40))}
    if dice.random() < 0.5:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": dice.random() < 0.3}
    if dice.random() < 0.5:
        return Ask(Api.CHAT, body | {"messages": [{"role": "user", "content": words}]})
    return Ask(Api.COMPLETIONS, body | {"prompt": dice.choice((words, [dice.randrange(40) for _ in range(9)]))})


def any_ask(dice):
    """Draw a request."""
    api = dice.choice((*[Api.COMPLETIONS, Api.CHAT] * 3, Api.RESPONSES, Api.MESSAGES, Api.GENERATE))
    words = " ".join(dice.choices(WORDS, k=dice.randrange(1, 5)))
    limit = dice.choice((1, 2, 3, 5, 9, 16, 40))
    body = {"model": "m", "stream": dice.random() < 0.7}
    if dice.random() < 0.2:
        body["cache_salt"] = dice.choice("ab")
    if api is Api.MESSAGES:
        return Ask(api, body | {"messages": [{"role": "user", "content": words}], "max_tokens": limit})
    if api is Api.GENERATE:
        return generate_ask(dice, body, limit)
    if api is Api.RESPONSES:
        return Ask(api, body | {"input": words, "max_output_tokens": limit, "store": False})
    return text_ask(dice, api, body, limit, words)


def text_ask(dice, api, body, limit, words):
    """Draw a request of OpenAI's first two APIs; some have no limit of their own, or two."""
    limits = {}, {"max_tokens": None}, {"max_tokens": limit + 3, "max_completion_tokens": limit}
    body |= {"max_tokens": limit} if dice.random() < 0.85 else dice.choice(limits[: 3 if api is Api.CHAT else 2])
    body["temperature"] = dice.choice((0, 0, 0, 0.7))
    if api is Api.CHAT:
        body["messages"] = [{"role": "user", "content": words}]
        more = (
            {"tools": [{"type": "function"}]},
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"logprobs": True},
        )
        body |= dice.choice((*[{}] * 5, *more))
        if "chat_template_kwargs" in body and dice.random() < 0.5:
            body["include_reasoning"] = False
    else:
        ids = [dice.randrange(40) for _ in range(dice.randrange(1, 20))]
        body["prompt"] = dice.choice((words, words, ids, ids, [words, "and"], [ids, ids[:1], [1, 2]], [ids], [words]))
        body |= dice.choice((*[{}] * 5, {"echo": True}, {"logprobs": 1}))
    for chance, fields in (
        (0.1, {"n": dice.choice((1, 2, 3))}),
        (0.05, {"seed": dice.randrange(9)}),
        (0.05, {"presence_penalty": 0.5}),
        (0.05, {"response_format": {"type": "json_object"}}),
        (0.2, {"stop_token_ids": dice.sample(range(40), 3), "min_tokens": min(limit, dice.randrange(3))}),
        (0.05, {"stop": ["zzz"]}),
        (0.1, {"return_token_ids": True}),
    ):
        if dice.random() < chance:
            body |= fields
    if body["stream"] and dice.random() < 0.5:
        body["stream_options"] = {"include_usage": dice.random() < 0.7, "continuous_usage_stats": dice.random() < 0.3}
    return Ask(api, body)


def generate_ask(dice, body, limit):
    """Draw a request for tokens, by tokens."""
    sampling = {"max_tokens": limit, "temperature": dice.choice((0, 0, 0.7))}
    sampling |= dice.choice((*[{}] * 3, {"n": 2}, {"seed": 3}, {"stop_token_ids": dice.sample(range(40), 3)}))
    if body["stream"] and dice.random() < 0.5:
        body["stream_options"] = {"include_usage": dice.random() < 0.7, "continuous_usage_stats": dice.random() < 0.3}
    ids = [dice.randrange(40) for _ in range(dice.randrange(1, 20))]
    return Ask(Api.GENERATE, body | {"token_ids": ids, "sampling_params": sampling})


# ---- the story


class Bugs(logging.Handler):
    """Keeps what the router says of its own mistakes."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.said = []

    def emit(self, record):
        self.said.append(logging.Formatter().format(record))


class Story:
    """One router, its engines and its clients, drawn from a seed."""

    def __init__(self, seed):
        self.dice = dice = random.Random(seed)
        self.calm = dice.random() < 0.2  # no engine fails
        self.ends_early = not self.calm and dice.random() < 0.15
        self.is_over = False  # the router
        self.is_asgi = dice.random() < 0.2  # by uvicorn's own protocol, which closes under a client that still sends
        self.ask = dice.choice((any_ask, any_ask, plain_ask))
        self.trouble = 0.0 if self.calm else dice.choice((0.05, 0.2, 0.5))
        self.fleet = Fleet(
            self.fate,
            dice,
            tells_cache=dice.random() < 0.5,
            mode=dice.choice(("pull", "pull", "push", "auto")),
            fails_loads=dice.random() < 0.3,
            offers=dice.random() < 0.5,
            style=drawn_style(dice),
            idle_s=dice.choice((None, None, 0.0, 0.01, 1.0)),
        )
        self.hosts = [*(f"p{i}" for i in range(dice.randrange(3))), *(f"d{i}" for i in range(dice.randrange(1, 4)))]
        for host in self.hosts:
            self.fleet.add(host)
        self.settings = with_values(
            Settings(
                prefill=tuple(f"{host}:80" for host in self.hosts if host[0] == "p"),
                decode=tuple(f"{host}:80" for host in self.hosts if host[0] == "d"),
                allowed_hosts=("*",),
                allowed_instances=tuple(self.hosts),
                admin_key="sesame",
            ),
            {
                "resume_streams": dice.random() < 0.7,
                "first_token_from": dice.choice((*FirstTokenFrom,)),
                "kv_transfer_mode": KvTransferMode(self.fleet.mode if dice.random() < 0.5 else "auto"),
                "retries": dice.choice((0, 1, 2, 2)),
                "retry_budget_ratio": 1.0,
                "max_concurrency": 100 if self.calm else dice.choice((100, 100, 3)),
                "max_queue": 2,
                "max_queue_wait_s": 5.0,
                "first_token_timeout_s": 6.0,
                "stream_idle_timeout_s": 8.0,
                "total_timeout_s": 40.0,
                "stream_comment_interval_s": dice.choice((0.0, 0.5)),
                "circuit_breaker_failures": dice.choice((0, 5)),
                "decode_only_fallback": "p0" not in self.hosts or dice.random() < 0.8,
                "prefill_policy": dice.choice(("round_robin", "least_loaded", "prefix")),
                "decode_policy": dice.choice(("round_robin", "power_of_two", "prefix")),
                "reuse_kv": dice.random() < 0.2,
            },
        )
        if dice.random() < 0.2:
            chosen = {"prefill_policy": EXPECTED_TTFT, "decode_policy": EXPECTED_TTFT}
            self.settings = with_values(self.settings, chosen | {"max_decode_itl_s": dice.choice((0.0, 0.5))})
        elif self.settings.decode_policy == "prefix":
            self.settings = with_values(self.settings, {"min_split_new_bytes": dice.choice((0, 0, 20, 60))})
        self.faults = []

    def fate(self):
        """Draw what becomes of a leg."""
        dice = self.dice
        kind = dice.choice(DEATHS) if dice.random() < self.trouble else "good"
        return Fate(
            kind,
            dice.random(),
            dice.choice((400, 429, 500, 503)),
            dice.random() < 0.6,
            0.3 if self.ask is plain_ask else dice.choice((0.0, 0.01, 0.3)),
            dice.choice((1, 1, 2)),
            dice.choice((0, 0, 5)),
        )

    async def tell(self):
        """Tell it to its end."""
        bugs = Bugs()
        dice = self.dice
        logger = logging.getLogger("pdrelay_proxy")
        logger.addHandler(bugs)
        router = self.router = build(self.settings, fabric=self.fleet.fabric())
        config = listeners.main_config(router, self.settings)
        config.load()
        self.state = ServerState()
        protocol = H11Protocol if self.is_asgi else config.http_protocol_class
        self.protocol = partial(protocol, config=config, server_state=self.state, app_state={})
        try:
            async with asyncio.timeout(1000), asyncio.TaskGroup() as group:
                async with router.app.router.lifespan_context(router.app):
                    await asyncio.sleep(1)
                    asks = [[self.ask(dice) for _ in range(dice.randrange(1, 4))] for _ in range(dice.randrange(3, 9))]
                    clients = [group.create_task(self.client(each)) for each in asks]
                    events = [] if self.calm else [group.create_task(self.event()) for _ in range(dice.randrange(5))]
                    await (self.end_early() if self.ends_early else asyncio.wait([*clients, *events]))
                    await asyncio.sleep(0 if self.ends_early else 20)
                    held = {} if self.ends_early else self.held()
                    for connection in tuple(self.state.connections):
                        connection.shutdown()
                self.is_over = True
        finally:
            logger.removeHandler(bugs)
        await asyncio.sleep(1)
        held = held or self.held()
        for engine in self.fleet.engines.values():
            engine.die()
        await asyncio.sleep(1)
        assert bugs.said == [], bugs.said
        assert set(held.values()) == {0}, held
        assert asyncio.all_tasks() == {asyncio.current_task()}, asyncio.all_tasks()
        assert self.faults == [], self.faults[0]

    async def end_early(self):
        """End the router as its process does that is asked to, whatever is under way."""
        dice, lifetime = self.dice, self.router.lifetime
        await asyncio.sleep(dice.choice((0.1, 1, 2, 4)))
        lifetime.on(Step.SHUTDOWN)
        await asyncio.sleep(dice.choice((0, 1)))
        lifetime.on(Step.GRACE_OVER)
        await asyncio.sleep(dice.choice((0, 2, 10)))

    def held(self):
        """Return what the router holds of requests that are over."""
        router = self.router
        admission, registry = router.live.gate.admission, router.live.registry
        return {
            "requests": len(list(router.requests)),
            "in flight": router.lifetime.in_flight,
            "admitted": admission.admitted,
            "waiting": admission.waiting,
            "bytes": admission.held_bytes,
            "slots": sum(registry.get(each.id).load.in_flight for role in Role for each in registry.known(role)),
        }

    async def event(self):
        """Have something happen to an engine: it dies, or an operator gives an order."""
        dice = self.dice
        await asyncio.sleep(dice.choice((0.1, 0.5, 1, 2, 4)))
        host = dice.choice(self.hosts)
        role, engine = ("prefill", "decode")[host[0] == "d"], self.fleet.engines[host]
        named = {"type": role, "instance": f"{host}:80"}
        kind = dice.choice(
            ("restart", "remove", "drain" if role == "prefill" else "move", "drain", "turn", "reload", "hang")
        )
        rests_s = dice.choice((0.1, 2, 12))
        if kind == "restart":
            await self.restart(host, rests_s)
        elif kind == "hang":
            engine.goes_on.clear()
            await asyncio.sleep(rests_s * 5)
            engine.goes_on.set()
        elif kind == "reload":
            self.reload()
        elif kind == "remove":
            await self.order("remove", named)
            await asyncio.sleep(rests_s)
            await self.order("add", named)
        elif kind == "turn":
            for to in (dice.choice(("prefill", "decode", "both")), role):
                await self.order("turn", named | {"to": to, "force": dice.random() < 0.5})
                await asyncio.sleep(rests_s)
        else:
            await self.order("drain", named | ({"move": True} if kind == "move" else {}))
            await asyncio.sleep(rests_s)
            if dice.random() < 0.5:
                await self.restart(host, rests_s)
            await self.order("undrain", named)

    async def restart(self, host, rests_s):
        """Have another process follow an engine at its address."""
        engine = self.fleet.engines[host]
        engine.die()
        await asyncio.sleep(rests_s)
        self.before_start(host, rests_s)
        engine.begin()

    def before_start(self, host, rests_s):
        """Hear that an engine is about to begin, which was away for so long."""

    def reload(self):
        """Have the router read its settings again, as at a SIGHUP."""
        old = self.settings
        self.settings = with_values(self.settings, self.other_settings())
        self.router.live.prepared(old, self.settings)()

    def other_settings(self):
        """Draw what operators may change meanwhile: some engine is not listed any more, or again."""
        dice = self.dice
        listed = [host for host in self.hosts if dice.random() < 0.8] or self.hosts
        return {
            "prefill": tuple(f"{host}:80" for host in listed if host[0] == "p"),
            "decode": tuple(f"{host}:80" for host in listed if host[0] == "d"),
            "resume_streams": self.fleet.shows_room or dice.random() < 0.7,  # what moves needs it
            "first_token_from": dice.choice((*FirstTokenFrom,)),
            "retries": dice.choice((0, 1, 2)),
            "max_concurrency": dice.choice((100, 3)),
            "stream_comment_interval_s": dice.choice((0.0, 0.5)),
            "decode_only_fallback": dice.random() < 0.8,
        }

    async def order(self, what, named):
        """Give an operator's order; it may be refused."""
        reader, writer = await self.connect()
        head = "x-api-key: sesame\r\nconnection: close\r\n"
        writer.write(request(f"/instances/{what}", json.dumps(named).encode(), head))
        with suppress(BrokenPipeError, ConnectionResetError):  # the router ends
            await reader.read()
        writer.close()

    async def connect(self):
        """Open a connection of a client."""
        ours, theirs = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(self.protocol, theirs)
        return await self.read_from(ours, transport)

    async def read_from(self, sock, _transport):
        """Return what reads and writes the client's end of a connection; ``_transport``: the router's end."""
        return await asyncio.open_connection(sock=sock)

    async def client(self, asks):
        """Send some requests, one behind the other or all at once, and look at what comes."""
        dice = self.dice
        await asyncio.sleep(dice.choice((0, 0, 0.1, 1, 3)))
        is_pipelined = dice.random() < 0.15
        reader = writer = None
        for place, ask in enumerate(asks):
            if self.is_over:
                break
            is_new = writer is None
            if is_new:
                reader, writer = await self.connect()
            for each in (asks[place:] if is_new else []) if is_pipelined else [ask]:
                await self.send(writer, each)
            ask.leaves_at = dice.choice((0, 0.01, 0.2, 2)) if dice.random() < 0.15 else None
            ask.pause_s = dice.choice((0.01, 0.5)) if dice.random() < 0.2 else 0.0
            if not await self.hear(ask, reader, may_be_closed=is_pipelined or not is_new):
                writer.transport.abort()
                writer = None
        if writer is not None:
            writer.close()

    async def send(self, writer, ask):
        """Send one request."""
        raw = json.dumps(ask.body, ensure_ascii=self.dice.random() < 0.5).encode()
        writer.write(request(ask.api.value, raw))

    async def hear(self, ask, reader, *, may_be_closed):
        """Look at one answer; tell whether the connection stays.

        ``may_be_closed``: it was kept, or has more requests in it, which are lost where the router closes it.
        """
        try:
            async with asyncio.timeout(ask.leaves_at):
                status, name, body, keeps = await self.answer(reader, ask)
        except TimeoutError:
            return False
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
            is_refused = self.is_asgi or self.router.lifetime.stage is Stage.CLOSED
            if may_be_closed or (is_refused and not ask.is_begun):
                return False
            raise
        try:
            self.check(ask, status, name, body)
        except Exception as fault:  # the story goes on, and tells it at its end
            self.faults.append((type(fault).__name__, str(fault)[:3000], ask, status, name, body))
        return keeps

    async def answer(self, reader, ask):
        """Read one answer; return its status, its request's id, its body, and whether the connection stays."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("http/1.1 100 "):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        ask.is_begun = True
        headers = dict(line.split(": ", 1) for line in head.strip().split("\r\n")[1:])
        body = b""
        if "content-length" in headers:
            body = b"" if ask.method == "HEAD" else await reader.readexactly(int(headers["content-length"]))
        elif "transfer-encoding" not in headers:
            body = await reader.read()
        else:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
                await asyncio.sleep(ask.pause_s)
            assert await reader.readexactly(2) == b"\r\n"
        return int(head.split(" ")[1]), headers.get("x-request-id"), body, headers.get("connection") != "close"

    def check(self, ask, status, name, body):
        """Accept an answer that is that of one engine to one meaning of the request, or an error."""
        if status != 200:
            self.check_error(ask, status, body)
            return
        faults = []
        for meaning in self.meanings(ask):
            try:
                self.check_answer(ask, meaning, name, body)
            except AssertionError as fault:
                faults.append(fault)
            else:
                return
        raise faults[0]

    def meanings(self, ask):
        """Return the bodies that an engine may have answered."""
        return [ask.body]

    def may_fail(self, _ask):
        """Tell whether a client may get an error."""
        return not self.calm or (self.fleet.idle_s is not None and not self.settings.retries)

    def check_error(self, ask, status, body):
        """Accept an error where something has failed."""
        assert status in (400, 429, 500, 502, 503, 504), status
        assert "error" in json.loads(body)
        assert self.may_fail(ask), "no engine has failed"

    def check_answer(self, ask, meaning, name, raw):
        """Accept what one engine says to a body, or its beginning and an error."""
        streams = meaning["stream"]
        body = flat(meaning)
        choices, usage, heads, end = read(ask.api, raw, streams=streams)
        wanted, all_usage, _, _ = read(ask.api, _said(Saying(ask.api, body, "x"), streams), streams=streams)
        assert end in ("whole", "error")
        if ask.api in (Api.COMPLETIONS, Api.CHAT, Api.GENERATE):
            assert len(heads) <= 1, heads
        if end == "error":
            assert streams
            assert self.may_fail(ask), "no engine has failed"
        else:
            assert ask.mistake is None
        if body.get("temperature") and "seed" not in body:
            self.check_sampled(ask.api, body, choices, usage, end)
            return
        for index, seen in choices.items():
            for part in ("text", "reasoning", "tool", "logprobs", "ids", "prompt_ids"):
                expected = getattr(wanted[index], part)
                got = getattr(seen, part)
                assert got == expected if end == "whole" else got == expected[: len(got)], (index, part, got, expected)
            assert seen.usages == sorted(seen.usages)
            assert {read_tokens for read_tokens, _ in seen.usages} <= {each[0] for each in wanted[index].usages}
            if end == "whole":
                assert seen.finish == wanted[index].finish
                assert seen.usages[-1:] == wanted[index].usages[-1:]
        assert end == "error" or choices.keys() == wanted.keys()
        if end == "whole":
            assert counted(usage)[0] == counted(all_usage)[0]
        self.check_cached(body, name, usage)

    def check_sampled(self, api, body, choices, usage, end):
        """Accept tokens of which each may follow those before."""
        if body.get("include_reasoning") is False or body.get("echo"):
            return
        n = body.get("n") or 1
        contexts = [prompt for prompt in prompts_of(body) for _ in range(n)]
        made = 0
        for index, seen in choices.items():
            assert body.get("return_token_ids") or not (seen.ids or seen.prompt_ids)
            tokens = [int(token) for token in re.findall(r" (\d+)", seen.reasoning + seen.text + seen.tool)]
            stops = body.get("stop_token_ids", ())
            for place, token in enumerate(tokens):
                allowed = next_tokens(body, [*contexts[index], *tokens[:place]], place, index % n)
                assert token in allowed or any(each in stops for each in allowed), (index, place, tokens)
            made += len(tokens) + (seen.finish == "stop" and api is not Api.GENERATE)
            if end == "whole":
                assert seen.finish in ("stop", "length")
                assert seen.finish == "stop" or len(tokens) == limit_of(body, contexts[index]), (seen, tokens)
        if end == "whole" and counted(usage)[0] is not None and not body.get("logprobs"):
            assert counted(usage)[0] == (sum(map(len, prompts_of(body))), made)

    def check_cached(self, body, name, usage):
        """Accept a number of cached tokens that an engine has found which computed the prompt, or more than that."""
        read_tokens, cached = counted(usage)
        found = [each[1] for each in self.fleet.heard if each[0].startswith(name) and each[1] is not None]
        if cached and len(prompts_of(body)) == 1:
            assert cached in [min(each, read_tokens[0] - 1) for each in found], (cached, found)


def request(path, body, more=""):
    """Return the bytes of a request."""
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{more}content-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def _said(saying, streams):
    return b"".join(saying.events()) if streams else json.dumps(saying.whole()).encode()


class StoryLoop(SimulatedLoop):
    """One on which work in threads takes a moment of its time, for a story is the same each time."""

    def run_in_executor(self, _executor, func, *args):
        """Do it at once, and say so later."""
        future = self.create_future()
        try:
            deliver = partial(future.set_result, func(*args))
        except Exception as error:
            deliver = partial(future.set_exception, error)
        self.call_later(0.001, lambda: future.done() or deliver())
        return future


def tell(seed, kind=Story):
    """Tell a story on a loop of its own; the router's own dice are the seed's, too."""
    before = random.getstate()
    random.seed(seed)
    try:
        with asyncio.Runner(loop_factory=StoryLoop) as runner:
            runner.run(kind(seed).tell())
    finally:
        random.setstate(before)
