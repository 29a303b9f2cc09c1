"""Stories of many tenants and models, of clients that send in every way there is, and of their mistakes.

As all stories (``stories.py``); and no tenant shares a prefix cache with another, no model answers for another, and
what one client does wrong costs no other an answer.
"""

import asyncio
import gzip
import json
import socket
import zlib
from dataclasses import dataclass
from itertools import pairwise

from pdrelay_proxy.known_settings import with_values
from pdrelay_proxy.settings import QueueOrder
from support.stories import Ask, Story
from support.story_answers import read
from support.story_engines import FORM, Plain, form_of, plain_answer, weights_of

TENANTS = (), ("alice",), ("alice", "bob"), ("alice", "bob", "carol")
VERSIONS = (  # of the weights of engines, and of those of their adapters
    (("", ""),),
    (("", ""), ("-v2", "")),
    (("", ""), ("", "-v2")),
)
MODELS = (  # of all engines, or of every second one
    (("m",),),
    (("m", "m@x"), ("m", "m@x")),
    (("m", "m+adapter"),),
    (("a",), ("b",)),
    (("a", "a@x", "a+adapter"), ("b", "b+adapter")),
)
ERRANDS = (
    *(("HEAD", path) for path in ("/health", "/v1/models", "/nothing")),
    *(("GET", path) for path in ("/v1/models", "/metrics", "/v1/completions")),
    ("OPTIONS", "/v1/chat/completions"),
)
WRITINGS = (  # of a JSON body
    *(lambda body, is_ascii=is_ascii: json.dumps(body, ensure_ascii=is_ascii).encode() for is_ascii in (False, True)),
    lambda body: json.dumps(body, indent=1).encode(),
    lambda body: json.dumps(body).encode("utf-16"),
    lambda body: json.dumps(body).replace('"m', '"\\u006d').encode(),  # names, too
    lambda body: f"{json.dumps(dict.fromkeys(body, 1))[:-1]}, {json.dumps(body)[1:]}".encode(),  # each name twice
)
NO_OBJECTS = b"{", b"[]", b"", b"\xff", b'{"model": "m", "kv_transfer_params": {}}'
LONG = 5000  # bytes of a body
AWAY_S = 11  # probes have seen by then that an engine was away
TIGHT = 4000  # of all bodies together


def ask_of_one_engine(dice):
    """Draw a request of an endpoint that one engine serves."""
    api = dice.choice((*Plain,))
    return Ask(api, {"model": "m", "file" if api is Plain.TRANSCRIPTION else "input": str(dice.random())})


@dataclass
class Sending:
    """How a request goes onto its connection."""

    coding: str = ""
    is_chunked: bool = False
    pieces: int = 1
    pause_s: float = 0.0
    waits: bool = False  # for 100 Continue, it says
    is_old: bool = False  # in HTTP/1.0
    raw: bytes | None = None  # in place of the body


class TenantStory(Story):
    """One router, its tenants and its models, drawn from a seed."""

    def __init__(self, seed, *, folder):
        """``folder``: where the file of keys may lie."""
        super().__init__(seed)
        dice = self.dice
        self.any_ask, self.ask = self.ask, self.tenants_ask
        self.is_probed = dice.random() < 0.7  # else no engine says what it serves
        self.fat = dice.choice((0, 0, 0.5))  # answers that clients cannot take at once, or that routers look at twice
        self.vandals = dice.choice((0, 0, 2, 5))
        self.owners = {}  # of answers, by the request's id
        self.sendings = {}
        self._settle_models()
        self.tenants = dice.choice(TENANTS)
        keys = folder / "keys"
        keys.write_text("".join(f"{name}:{key_of(name)}\n" for name in self.tenants))
        own = {"api_keys_file": str(keys)} | self.limits()
        most = dice.choice((1 << 30, 1 << 30, TIGHT))
        self.is_tight = most == TIGHT or (self.tenants and any(own[name] for name in own if name.startswith("max_")))
        self.fleet.shows_room = dice.random() < 0.3
        more = own if self.tenants else {}
        more |= {"resume_streams": True, "move_above": 0.9} if self.fleet.shows_room else {}
        more |= {"return_kv": dice.random() < 0.5 and self.settings.decode_policy == "prefix"}
        more |= {"health_check_interval_s": 5.0 if self.is_probed else 0.0, "engine_metrics_interval_s": 1.0}
        more |= {"max_inflight_bytes": most, "max_body_bytes": min(most, dice.choice((16 << 20, 3000)))}
        self.settings = with_values(self.settings, more)

    def _settle_models(self):
        """Draw what engines serve: some of their weights may be newer ones."""
        dice, fleet = self.dice, self.fleet
        models = self.models = dice.choice(MODELS)
        self.versions = dice.choice(VERSIONS) if self.is_probed else VERSIONS[0]
        sides = {"p": set(), "d": set()}
        for host in self.hosts:
            number = int(host[1:])
            fleet.models[host] = models[number % len(models)]
            fleet.versions[host] = self.versions[number % len(self.versions)]
            sides[host[0]].update(fleet.models[host])
        self.bases = {weights_of(name) for names in sides.values() for name in names if "+" not in name}
        self.names = sorted(sides["d"] if self.settings.decode_only_fallback else sides["p"] & sides["d"])
        if not self.names:
            self.calm, self.names = False, sorted(sides["d"])

    # ---- what happens

    def before_start(self, host, rests_s):
        """What was away for long may have other models, or newer weights."""
        fleet = self.fleet
        if rests_s > AWAY_S and self.is_probed:
            fleet.models[host], fleet.versions[host] = self.dice.choice(self.models), self.dice.choice(self.versions)

    def other_settings(self):
        """Draw other limits of keys, too."""
        limits = self.limits() if self.tenants else {}
        self.is_tight = True
        return super().other_settings() | limits

    def limits(self):
        """Draw what keys may have."""
        dice = self.dice
        return {
            "max_key_rate": dice.choice((None, None, 2.0)),
            "max_key_concurrency": dice.choice((None, None, 1, 3)),
            "max_key_tokens_per_minute": dice.choice((None, None, 100)),
            "queue_order": dice.choice((*QueueOrder,)),
        }

    # ---- what clients send

    def tenants_ask(self, dice):
        """Draw a request for one of the models, or an errand; some are mistakes."""
        if dice.random() < 0.1:
            method, path = dice.choice(ERRANDS)
            return Ask(None, {"path": path}, method=method)
        ask = ask_of_one_engine(dice) if dice.random() < 0.15 else self.any_ask(dice)
        body = ask.body
        sending = Sending()
        self.sendings[id(ask)] = ask, sending
        body["model"] = dice.choice(self.names)
        sending.coding = dice.choice(("", "", "", "gzip", "deflate"))
        sending.is_chunked = dice.random() < 0.3
        sending.pieces = dice.choice((1, 1, 1, 2, 5))
        sending.pause_s = dice.choice((0, 0, 0.01, 0.4))
        sending.waits = dice.random() < 0.1
        sending.is_old = not (sending.is_chunked or sending.waits) and dice.random() < 0.2
        if dice.random() < self.fat:
            body["user"] = dice.choice(("fat", "nosy"))
        if ask.api in Plain:
            dice.choice((lambda _: None, self.no_model, self.no_such_model))(ask)
        elif dice.random() < 0.25:
            dice.choice((self.no_model, self.no_such_model, self.no_good_prompt, self.no_object, self.too_long))(ask)
        return ask

    def no_model(self, ask):
        """Leave the choice to the router: it has none where it knows of several."""
        del ask.body["model"]
        if len(self.bases) > 1 and self.is_probed and self.calm:
            ask.mistake = 400

    def no_such_model(self, ask):
        """Name one that no engine has."""
        ask.body["model"] = "nothing"
        ask.mistake = 404

    def no_good_prompt(self, ask):
        """Ask for what all engines refuse."""
        ask.mistake = self.dice.choice((400, 404, 422, 501))
        ask.body["user"] = str(ask.mistake)

    def no_object(self, ask):
        """Send no object, or not what it is said to be."""
        sending = self.sendings[id(ask)][1]
        if self.dice.random() < 0.3:
            sending.coding, ask.mistake = "br", 415
        else:
            sending.raw = self.dice.choice(NO_OBJECTS)
            ask.mistake = 400

    def too_long(self, ask):
        """Send more than a body may have, or not so much."""
        ask.body["metadata"] = {"long": "x" * LONG}
        ask.mistake = 413 if self.settings.max_body_bytes < LONG else None

    async def client(self, asks):
        """Send some requests; beside them somebody may send none."""
        tenant = self.dice.choice(self.tenants or (None,))
        for place, ask in enumerate(asks, start=1):
            ask.sender = tenant
            if ask.api is not None and place < len(asks):
                self.sendings[id(ask)][1].is_old = False  # nothing may follow
        async with asyncio.TaskGroup() as group:
            if self.vandals:
                self.vandals -= 1
                group.create_task(self.vandal())
            await super().client(asks)

    async def send(self, writer, ask):
        """Send one request in its way."""
        dice = self.dice
        key = dice.choice(("x-api-key: {}", "authorization: Bearer {}")).format(key_of(ask.sender))
        head = f"{ask.method} {ask.body['path'] if ask.api is None else ask.api.value} HTTP/1.1\r\nhost: a\r\n{key}\r\n"
        if ask.api is None:
            writer.write(f"{head}\r\n".encode())
            return
        sending = self.sendings[id(ask)][1]
        head = head.replace("HTTP/1.1", "HTTP/1.0") if sending.is_old else head
        is_form = ask.api is Plain.TRANSCRIPTION
        raw = sending.raw
        if raw is None:
            raw = form_of(ask.body) if is_form else dice.choice(WRITINGS)(ask.body)
        raw = {"gzip": gzip.compress, "deflate": zlib.compress}.get(sending.coding, bytes)(raw)
        head += f"content-type: {FORM.decode() if is_form else 'application/json'}\r\n"
        head += f"content-encoding: {sending.coding}\r\n" if sending.coding else ""
        head += "expect: 100-continue\r\n" if sending.waits else ""
        head += "transfer-encoding: chunked" if sending.is_chunked else f"content-length: {len(raw)}"
        cuts = [0, *sorted(dice.randrange(len(raw) + 1) for _ in range(sending.pieces - 1)), len(raw)]
        pieces = [raw[begin:end] for begin, end in pairwise(cuts)]
        if sending.is_chunked:
            pieces = [*(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece), b"0\r\n\r\n"]
        pieces[0] = f"{head}\r\n\r\n".encode() + pieces[0]
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(sending.pause_s)

    async def vandal(self):
        """Send what is no request, or half of one, and leave."""
        dice = self.dice
        await asyncio.sleep(dice.choice((0, 1, 2, 3)))
        _, writer = await self.connect()
        key = key_of(dice.choice(("nobody", *self.tenants)))
        body = b'{"model": "m", "prompt": "hi", "max_tokens": 9}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-api-key: {key}\r\n".encode()
        sized, chunked = b"%bcontent-length: %%d\r\n\r\n" % head, head + b"transfer-encoding: chunked\r\n\r\n"
        written = (
            *(b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"x" * 70_000, head),
            *(sized % 10**12, sized % 99 + body, sized % len(body) + body + b"more", sized % len(body) + body + head),
            *(head + b"content-length: 9\r\n" + sized[len(head) :] % 8, chunked + b"zz\r\n", chunked + b"9\r\n{"),
        )
        writer.write(dice.choice(written))
        await asyncio.sleep(dice.choice((0, 0.1, 5, 40)))
        writer.transport.abort()

    async def read_from(self, sock, transport):
        """Return a client that may take little at a time: the router's end has small buffers."""
        if self.dice.random() < 0.7:
            return await super().read_from(sock, transport)
        transport.set_write_buffer_limits(high=self.dice.choice((0, 500, 3000)))
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return await asyncio.open_connection(sock=sock, limit=1000)

    # ---- what they get

    def check(self, ask, status, name, body):
        """Accept an answer as in all stories; an errand has one."""
        if ask.api is not None:
            assert self.owners.setdefault(name, ask.sender) == ask.sender
            super().check(ask, status, name, body)

    def meanings(self, ask):
        """Return the body for each model that it may mean, with the weights that are served under its name."""
        models = [ask.body["model"]] if "model" in ask.body else sorted(self.bases)
        asked = {
            (model, weights_of(model) + base + (adapter if "+" in model else ""))
            for model in models
            for base, adapter in self.versions
        }
        return [ask.body | {"model": model, "weights": weights} for model, weights in sorted(asked)]

    def may_fail(self, ask):
        """Tell whether a client may get an error: by itself, by a limit, or where engines must be tried."""
        return not self.calm or ask.mistake is not None or self.is_tight or not self.is_probed

    def check_error(self, ask, status, body):
        """Accept the client's own error, or one that it may get where something has failed or is full."""
        statuses = {ask.mistake}
        statuses |= {429, 503} if self.is_tight else set()
        statuses |= set() if self.is_probed else {404}
        statuses |= set() if self.calm else {400, 404, 429, 500, 502, 503, 504}
        assert status in statuses, (status, statuses)
        assert "error" in json.loads(body)

    def check_answer(self, ask, meaning, name, raw):
        """Accept what one engine says; the parts of a request with several prompts may have different weights."""
        if ask.api in Plain:
            assert json.loads(raw) == plain_answer(meaning)
            return
        several = (
            isinstance(prompt := meaning.get("prompt"), list) and len(prompt) > 1 and not isinstance(prompt[0], int)
        )
        if several and len(self.versions) > 1:
            assert read(ask.api, raw, streams=meaning["stream"])[3] == "whole" or self.may_fail(ask)
        else:
            super().check_answer(ask, meaning, name, raw)

    async def tell(self):
        """Tell it to its end: each salt is one tenant's."""
        await super().tell()
        tenants = {}
        for leg, _, salt in self.fleet.heard if len(self.tenants) > 1 else ():
            owner = next((owner for name, owner in self.owners.items() if leg.startswith(name)), None)
            assert owner is None or (salt and tenants.setdefault(salt, owner) == owner), leg


def key_of(name):
    """Return a tenant's key."""
    return f"key-of-{name}-16-chars"
