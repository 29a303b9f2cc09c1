"""Engines for stories: what they say follows from the request alone, and they say it as vLLM does, or die over it.

``said`` has all of what one engine says to a body: a router's client must get just that. An engine that reads KV goes
on behind the tokens of that KV, whosever they are; what looks back at an answer (a penalty, a seed, a grammar) begins
anew wherever a request begins. So a mistake in what a router asks of engines is a wrong text.
"""

import asyncio
import json
import re
import zlib
from collections import defaultdict
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import count, zip_longest

import httpx

from pdrelay_proxy.app import Fabric
from pdrelay_proxy.core.model import Api
from support.engine_styles import Style
from support.greedy import HALF, VOCABULARY, stops_of
from support.sim import connect


class Plain(StrEnum):
    """Endpoints that one engine serves, whatever they are for."""

    EMBEDDINGS = "/v1/embeddings"
    SCORE = "/score"
    TOKENIZE = "/tokenize"
    COUNT = "/v1/messages/count_tokens"
    TRANSCRIPTION = "/v1/audio/transcriptions"


PATHS = {api.value: api for api in (*Api, *Plain)}
FORM = b"multipart/form-data; boundary=b"
BLOCK = 4  # tokens: an engine has whole blocks in its cache
ROOM = (
    b"\nvllm:num_requests_running 1\nvllm:num_requests_waiting 0"
    b"\nvllm:kv_cache_usage_perc %f\nvllm:num_preemptions_total 0\n"
)
CONTEXT = 150  # tokens of prompt and answer, where a request has no limit
LEASE_S = 3.0  # a decode engine waits so long for what is pushed
_LOOKING_BACK = ("presence_penalty", "frequency_penalty", "response_format", "structured_outputs")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_NAMES = {
    Api.COMPLETIONS: "cmpl-{}-0",
    Api.CHAT: "chatcmpl-{}",
    Api.RESPONSES: "resp_{}_0",
    Api.MESSAGES: "chatcmpl-{}",
    Api.GENERATE: "generate-tokens-{}",
}


def prompts_of(body):
    """Return the tokens of each prompt of a body."""
    params = body.get("kv_transfer_params") or {}
    prompt = next(body[name] for name in ("messages", "input", "token_ids", "prompt") if name in body)
    if "prompt_token_ids" in params:
        return [params["prompt_token_ids"]]
    several = prompt if "prompt" in body and isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    return [tokens_of(one) for one in several]


def tokens_of(prompt):
    """Return the tokens of one prompt."""
    is_ids = isinstance(prompt, list) and prompt and isinstance(prompt[0], int)
    return prompt if is_ids else [byte % VOCABULARY for byte in json.dumps(prompt).encode()]


def limit_of(body, prompt):
    """Return how many tokens each answer to a prompt may have."""
    limit = next((body[name] for name in _LIMITS if body.get(name) is not None), None)
    if limit is None and ("prompt" in body or "token_ids" in body) and "max_tokens" not in body:
        return 16
    return limit or max(1, CONTEXT - len(prompt))


def flat(body):
    """Return a body with its sampling parameters beside the other fields, where most APIs have them."""
    return body | body.get("sampling_params", {})


def plain_answer(body):
    """Return what an engine says to a body of another endpoint: all of it counts, but for what routers may add."""
    meant = {name: value for name, value in body.items() if name not in ("model", "cache_salt")}
    return {"digest": zlib.crc32(json.dumps(meant, sort_keys=True).encode()), "usage": {"prompt_tokens": len(meant)}}


def form_of(body):
    """Return a form with these fields."""
    part = '--b\r\ncontent-disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    return ("".join(part.format(name, value) for name, value in body.items()) + "--b--\r\n").encode()


def _fields_of(content_type, body):
    if content_type != FORM:
        return json.loads(body)
    return {name.decode(): value.decode() for name, value in re.findall(rb'name="(.+?)"\r\n\r\n(.*?)\r\n--', body)}


def weights_of(model):
    """Return which weights a name means: ``a@x`` is another name of ``a``, and ``a+x`` an adapter."""
    return model.partition("@")[0]


def next_tokens(body, context, made, index):
    """Return the tokens that may follow: one, or two where a request is sampled without a seed."""
    looks_back = any(body.get(name) for name in _LOOKING_BACK) or (body.get("temperature") and "seed" in body)
    weight = sum(place * token for place, token in enumerate(context, 1)) * 31 + len(context) + index * 3
    weight += sum((body.get("weights") or weights_of(body.get("model") or "m")).encode())
    token = (weight + (5 * made + body.get("seed", 0) + 1 if looks_back else 0)) % VOCABULARY
    is_free = body.get("temperature") and "seed" not in body
    return (token, (token + 1) % VOCABULARY) if is_free else (token,)


@dataclass
class Step:
    """What an engine has made of one choice at a time."""

    index: int
    ids: list
    text: str
    part: str = "text"  # or reasoning, or tool
    finish: str | None = None
    stop: int | None = None


def steps(api, body, context, index, *, per_event=1, sampled=min):
    """Yield the steps of one choice; ``sampled`` chooses among tokens."""
    made = []
    limit = limit_of(body, context)
    pending = ""
    start = 0
    thinks = 3 if (body.get("chat_template_kwargs") or {}).get("enable_thinking") else 0
    while True:
        ids = []
        text = ""
        for _ in range(per_event):
            stops, banned = stops_of(body, len(made))
            token = sampled(next_tokens(body, [*context, *made], len(made), index))
            while token in banned:
                token = (token + 1) % VOCABULARY
            made.append(token)
            ids.append(token)
            is_end = token in stops
            is_over = token in stops or len(made) >= limit
            pending += "" if is_end else f" {token}" + ("é" if token % 3 == 0 else "") + ("<" if token % 5 == 0 else "")
            pending += "~" * 10_000 * (body.get("user") == "fat" and not is_end)
            pending += '"kv_transfer_params":{"a":null}' * (
                body.get("user") == "nosy" and token % 7 == 0 and not is_end
            )
            if token % HALF or is_over:
                kept = "<" if api is Api.CHAT and pending.endswith("<") and not is_over else ""
                text += pending.removesuffix(kept)
                pending = kept
            if is_over or len(made) in (thinks, thinks + 3):
                break
        part = "reasoning" if start < thinks else "tool" if body.get("tools") and start >= thinks + 3 else "text"
        start = len(made)
        finish = ("stop" if is_end else "length") if is_over else None
        yield Step(index, ids, text, part, finish, token if is_end else None)
        if is_over:
            return


class Saying:
    """What one engine says to one body: whole, or as events."""

    def __init__(self, api, body, name, *, created=7, prompts=None, contexts=None, cached=None, per_event=1, **chance):
        """``contexts``: what it goes on behind, prompt by prompt, where that is no prompt; ``cached``: tokens."""
        self.api = api
        self.body = body
        self.cached = cached
        self.prompts = prompts or prompts_of(body)
        self._head = {"id": name, "created": created, "model": body.get("model", "m")}
        if api is Api.GENERATE:
            self._head = {"request_id": name}
        n = body.get("n") or 1
        self.choices = [
            [
                replace(step, index=place * n + index)
                for step in steps(api, body, context, index, per_event=per_event, **chance)
            ]
            for place, context in enumerate(contexts or self.prompts)
            for index in range(n)
        ]

    def abort(self, after):
        """End each choice behind so many steps, as an engine does that shuts down."""
        for index, choice in enumerate(self.choices):
            if len(choice) > after:
                choice[after:] = [Step(index, [], "", finish="abort")]

    @property
    def made(self):
        return sum(len(step.ids) for choice in self.choices for step in choice)

    def usage(self, made=None, prompt=None):
        """Return what it counts; ``made``: so far, of one choice."""
        read = sum(map(len, self.prompts)) if prompt is None else prompt
        wrote = self.made if made is None else made
        cached = self.cached
        if self.api is Api.MESSAGES:
            told = {} if cached is None else {"cache_read_input_tokens": cached}
            return {"input_tokens": read - (cached or 0), "output_tokens": wrote} | told
        if self.api is Api.RESPONSES:
            told = {"input_tokens_details": {"cached_tokens": cached or 0}}
            return {"input_tokens": read, "output_tokens": wrote, "total_tokens": read + wrote} | told
        told = {} if cached is None or made is not None else {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote} | told

    # ---- whole

    def whole(self):
        """Return the answer that is no stream."""
        if self.api is Api.GENERATE:
            choices = [self._tokens([i for step in c for i in step.ids], c[-1]) for c in self.choices]
            return self._head | {
                "model": self.body.get("model", "m"),
                "created": 5,
                "choices": choices,
                "usage": self.usage(),
            }
        if self.api in (Api.COMPLETIONS, Api.CHAT):
            return (
                self._head
                | {"object": "whole", "choices": list(map(self._whole, self.choices)), "usage": self.usage()}
                | (
                    {"prompt_token_ids": self.prompts[0]}
                    if self.api is Api.CHAT and self.body.get("return_token_ids")
                    else {}
                )
            )
        text = "".join(step.text for step in self.choices[0])
        finish = self.choices[0][-1].finish
        if self.api is Api.MESSAGES:
            said = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": text}]}
            return self._head | said | {"stop_reason": _STOPS.get(finish), "usage": self.usage()}
        return self._response(text, "incomplete" if finish == "length" else "completed")

    @staticmethod
    def _tokens(ids, step):
        said = {"index": step.index, "token_ids": ids, "finish_reason": step.finish, "stop_reason": step.stop}
        return said | {"logprobs": None}

    def _response(self, text, status):
        output = [{"type": "message", "content": [{"type": "output_text", "text": text}]}]
        return self._head | {"object": "response", "status": status, "output": output, "usage": self.usage()}

    def _whole(self, choice):
        text = "".join(step.text for step in choice)
        last = choice[-1]
        said = {"index": last.index, "finish_reason": last.finish, "stop_reason": last.stop} | self._logprobs(choice)
        said |= {"token_ids": [i for step in choice for i in step.ids] if self.body.get("return_token_ids") else None}
        if self.api is Api.COMPLETIONS:
            prompt = self.prompts[last.index // (self.body.get("n") or 1)]
            ids = {"prompt_token_ids": prompt if self.body.get("return_token_ids") else None}
            return said | {"text": self._echoed(last.index) + text} | ids
        parts = {
            part: "".join(step.text for step in choice if step.part == part) for part in ("text", "reasoning", "tool")
        }
        message = {"role": "assistant", "content": parts["text"], "tool_calls": []}
        if parts["reasoning"] and self.body.get("include_reasoning") is not False:
            message["reasoning"] = parts["reasoning"]
        if parts["tool"]:
            message["tool_calls"] = [{"index": 0, "function": {"arguments": parts["tool"]}}]
        return said | {"message": message}

    def _echoed(self, index):
        return (
            "".join(f"[{i}]" for i in self.prompts[index // (self.body.get("n") or 1)]) if self.body.get("echo") else ""
        )

    def _logprobs(self, run, before=0):
        if self.body.get("logprobs") in (None, False):
            return {"logprobs": None}
        tokens = [f" {i}" for step in run for i in step.ids]
        if self.api is Api.CHAT:
            return {"logprobs": {"content": [{"token": token} for token in tokens]}}
        offsets = [before + len("".join(tokens[:place])) for place in range(len(tokens))]
        return {"logprobs": {"tokens": tokens, "text_offset": offsets}}

    # ---- events

    def events(self):
        """Return the stream, event by event, with all choices side by side."""
        runs = [self._run(choice) for choice in self.choices]
        if self.api is Api.RESPONSES:
            return self._responses()
        if self.api is Api.MESSAGES:
            return self._messages()
        first = []
        if self.api is Api.CHAT:
            ids = {"prompt_token_ids": self.prompts[0] if self.body.get("return_token_ids") else None}
            for index in range(len(runs)):
                choice = {
                    "index": index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
                first.append(_event(self._chunk(choice, self._continuous(0, index)) | ids))
        shown = [event for turn in zip_longest(*runs) for event in turn if event]
        options = self.body.get("stream_options") or {}
        last = [_event(self._head | {"choices": [], "usage": self.usage()})] if options.get("include_usage") else []
        return [*first, *shown, *last, b"data: [DONE]\n\n"]

    def _continuous(self, made, index):
        options = self.body.get("stream_options") or {}
        prompt = len(self.prompts[index // (self.body.get("n") or 1)])
        is_told = options.get("include_usage") and options.get("continuous_usage_stats")
        return {"usage": self.usage(made, prompt)} if is_told else {}

    def _chunk(self, choice, more):
        return (
            self._head | {"output_mode" if self.api is Api.GENERATE else "object": "chunk", "choices": [choice]} | more
        )

    def _run(self, choice):
        made, offset = 0, 0
        if self.api is Api.GENERATE:
            for step in choice:
                made += len(step.ids)
                yield _event(self._chunk(self._tokens(step.ids, step), self._continuous(made, step.index)))
            return
        hides = self.body.get("include_reasoning") is False and self.api is Api.CHAT
        for place, step in enumerate(choice):
            made += len(step.ids)
            if step.finish == "abort" and not made:
                return  # vLLM skips it
            if hides and step.part == "reasoning" and not step.finish:
                continue
            said = {"index": step.index} | self._logprobs([step], offset) | {"finish_reason": step.finish}
            offset += sum(len(f" {i}") for i in step.ids)
            said |= {"stop_reason": step.stop} if step.finish or self.api is Api.COMPLETIONS else {}
            said |= {"token_ids": step.ids if self.body.get("return_token_ids") and not hides else None}
            if self.api is Api.COMPLETIONS:
                shows = not place and self.body.get("return_token_ids")
                ids = self.prompts[step.index // (self.body.get("n") or 1)] if shows else None
                said |= {"text": ("" if place else self._echoed(step.index)) + step.text, "prompt_token_ids": ids}
            else:
                name = {"text": "content", "reasoning": "reasoning"}.get(step.part, "tool_calls")
                value = [{"index": 0, "function": {"arguments": step.text}}] if name == "tool_calls" else step.text
                said |= {"delta": {} if hides and step.part == "reasoning" else {name: value}}
            yield _event(self._chunk(said, self._continuous(made, step.index)))

    def _messages(self):
        begun = self._head | {
            "type": "message",
            "role": "assistant",
            "content": [],
            "stop_reason": None,
            "usage": self.usage(0),
        }
        yield _event({"type": "message_start", "message": begun})
        yield _event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
        for step in self.choices[0]:
            if step.ids:
                yield _event(
                    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": step.text}}
                )
        yield _event({"type": "content_block_stop", "index": 0})
        stop = _STOPS.get(self.choices[0][-1].finish) if self.made else "end_turn"
        yield _event({"type": "message_delta", "delta": {"stop_reason": stop}, "usage": self.usage()})
        yield _event({"type": "message_stop"})

    def _responses(self):
        begun = self._head | {"object": "response", "status": "in_progress", "output": []}
        for name in ("created", "in_progress"):
            yield _event({"type": f"response.{name}", "response": begun})
        for step in self.choices[0]:
            if step.ids:
                yield _event({"type": "response.output_text.delta", "delta": step.text})
        text = "".join(step.text for step in self.choices[0])
        yield _event({"type": "response.completed", "response": self._response(text, "completed")})


_STOPS = {"stop": "end_turn", "length": "max_tokens"}


def _event(data):
    named = b"event: %b\n" % data["type"].encode() if "type" in data else b""
    return named + b"data: " + json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def error_event(api, code=500):
    """Return what an engine writes into a stream when it fails."""
    error = {"error": {"message": "it broke", "type": "InternalServerError", "param": None, "code": code}}
    return _event({"type": "error"} | error if api is Api.MESSAGES else error)


# ---- engines, and what is between them


@dataclass
class Fate:
    """What becomes of one leg: ``kind`` at a ``place``, 0 to 1, of its answer."""

    kind: str = "good"  # status, cut, stall, error, abort
    place: float = 0.0
    status: int = 500
    at_edge: bool = False  # between two events
    pace_s: float = 0.0  # between two events
    per_event: int = 1
    cuts: int = 0  # further pieces in which it comes


@dataclass
class Fleet:
    """Engines by the host of their address, and the KV that they have for each other."""

    fate: object  # returns that of the next leg
    dice: object
    tells_cache: bool = False
    mode: str = "pull"
    fails_loads: bool = False  # a request whose KV does not come fails; False: its engine computes it
    offers: bool = False  # clients may get a prefill engine's token
    models: dict = field(default_factory=dict)  # what engines serve, by host; others serve ``m``
    versions: dict = field(default_factory=dict)  # of the weights, by host, and of those of adapters
    idle_s: float | None = None  # after which engines close connections, without a word
    shows_room: bool = False  # how full their KV caches are: now they are, now they are not
    style: Style = field(default_factory=Style)
    engines: dict = field(default_factory=dict)
    kv: dict = field(default_factory=dict)  # weights, salt and tokens, by engine id and name
    # of each leg: its id, cached tokens of a prompt that was computed, and its salt
    heard: list = field(default_factory=list)
    numbers: count = field(default_factory=count)

    def add(self, host):
        self.engines[host] = Engine(self, host)

    def fabric(self):
        return Fabric(_Probes(self), self.dial, asyncio.get_running_loop().time)

    async def dial(self, protocol, host, port):
        engine = self.engines[host]
        if not engine.is_up:
            raise ConnectionRefusedError("nobody listens there")
        await connect(protocol, partial(Line, engine))


class _Probes(httpx.AsyncBaseTransport):
    def __init__(self, fleet):
        self._fleet = fleet

    async def handle_async_request(self, request):
        engine = self._fleet.engines[request.url.host]
        if not engine.is_up:
            raise httpx.ConnectError("nobody listens there", request=request)
        await engine.goes_on.wait()
        said = {"/v1/models": engine.models(), "/version": {"version": "0.32.0"}}.get(request.url.path)
        if said is not None:
            return httpx.Response(200, content=json.dumps(said).encode())
        shows_room = request.url.path == "/metrics" and self._fleet.shows_room
        return httpx.Response(200, content=ROOM % self._fleet.dice.choice((0.2, 0.5, 0.95)) if shows_room else b"")


class Engine:
    """One process of vLLM, and those that follow it at its address."""

    def __init__(self, fleet, host):
        self.fleet = fleet
        self.host = host
        self.is_up = True
        self.lines = {}
        self.goes_on = asyncio.Event()  # it takes connections, and else stands still
        self.goes_on.set()
        self.begin()

    def begin(self):
        self.id, self.cache, self.is_up = f"{self.host}-{next(self.fleet.numbers)}", defaultdict(list), True

    def die(self):
        """Its connections break, and its KV is lost."""
        self.is_up = False
        for line in tuple(self.lines):
            line.transport.abort()
        for key in [key for key in self.fleet.kv if key[0] == self.id]:
            del self.fleet.kv[key]

    def models(self):
        """Return what it says of its models."""
        names = self.fleet.models.get(self.host, ("m",))
        return {
            "data": [{"id": n, "root": self.weights(n)} | ({"parent": names[0]} if "+" in n else {}) for n in names]
        }

    def weights(self, name):
        """Return which weights it has under a name."""
        base, adapter = self.fleet.versions.get(self.host, ("", ""))
        return weights_of(name) + base + (adapter if "+" in name else "")

    def cached(self, body, prompt):
        """Return how many tokens of a prompt are in its cache, and keep it."""
        kept = self.cache[body["weights"], body.get("cache_salt")]
        same = max((_same(prompt, other) for other in kept), default=0)
        kept.append(prompt)
        return min(same, len(prompt) - 1) // BLOCK * BLOCK

    def _meant(self, body):
        """Return a body with the model that it means here, and its weights; None: this engine has no such model."""
        names = self.fleet.models.get(self.host, ("m",))
        name = body.get("model") or names[0]
        if name not in names:
            return None
        name = name if "+" in name else names[0]
        return flat(body) | {"model": name, "weights": self.weights(name)}

    async def answer(self, path, name, body):
        """Return the pieces of an answer, head first, and what becomes of them."""
        api = PATHS[path]
        fate = self.fleet.fate()
        model = body.get("model")
        body = self._meant(body)
        if body is None:
            return self._error(404, f"The model `{model}` does not exist."), fate
        if str(body.get("user")).isdigit():
            return self._error(int(body["user"]), "it asks for that"), fate
        if fate.kind == "status":
            return self._error(fate.status, "no"), fate
        if api in Plain:
            return self.fleet.style.whole(200, plain_answer(body)), fate
        return await self._generated(api, name, body, fate)

    async def _generated(self, api, name, body, fate):
        """Return an answer to a prompt."""
        style = self.fleet.style
        params = body.get("kv_transfer_params") or {}
        (prompt, *_) = prompts = prompts_of(body)
        limit = limit_of(body, prompt)
        if limit == 2**31 - 1 or "abandoned_transfer_id" in params:
            return self._error(400, "too many"), fate
        contexts = prompts
        cached = None
        if params.get("do_remote_prefill"):
            kv = await self._load(params, body)
            if kv is None and self.fleet.fails_loads:
                error = style.stream([error_event(api), b"data: [DONE]\n\n"])
                return error if body.get("stream") else style.whole(500, {"error": {"message": "no KV"}}), fate
            if kv is not None:
                cached = params.get("remote_prefill_cached_tokens", len(prompt) - 1)
                contexts = [[*kv, *prompt[len(kv) :]]]
        found = self.cached(body, prompt) if cached is None else None
        self.fleet.heard.append((name, found, body.get("cache_salt")))
        cached = found if cached is None else cached
        shown = cached if self.fleet.tells_cache else None
        known = _NAMES[api].format(name)
        created = next(self.fleet.numbers)
        chance = {"per_event": fate.per_event, "sampled": self.fleet.dice.choice}
        said = Saying(api, body, known, created=created, contexts=contexts, cached=shown, **chance)
        if fate.kind == "abort":  # that /v1/responses calls one with a token completed, only vLLM could mend
            said.abort(0 if api is Api.RESPONSES else int(fate.place * 6))
        if body.get("stream"):
            return self._streamed(api, said, fate)
        lends = params.get("do_remote_decode") and fate.kind != "abort"
        assert not params.get("do_remote_decode") or limit == 1, body
        lent = {"kv_transfer_params": self._lend(known, params, body, prompt, cached)} if lends else {}
        return style.whole(200, said.whole() | lent), fate

    def _error(self, status, message):
        said = {"message": message, "type": "x", "param": None, "code": status}
        return self.fleet.style.whole(status, {"error": said})

    def _streamed(self, api, said, fate):
        events = list(said.events())
        if fate.kind == "error" and api is Api.RESPONSES:  # vLLM raises: such an event is none of this API's
            fate = replace(fate, kind="cut", at_edge=True)
        elif fate.kind == "error":
            end = [] if api is Api.MESSAGES else [b"data: [DONE]\n\n"]
            events[int(fate.place * len(events)) :] = [error_event(api), *end]
        return self.fleet.style.stream(events), fate

    def _lend(self, name, params, body, prompt, cached):
        """Return the parameters with which a decode engine gets the KV of a prompt."""
        fleet = self.fleet
        known = f"{name}-{next(self.fleet.numbers):08x}"
        pushes = fleet.mode == "push" or params.get("transfer_mode") == "push"
        key = self.id, params["transfer_id"] if pushes else known
        fleet.kv[key] = body["weights"], body.get("cache_salt"), prompt
        lent = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": self.id,
            "remote_request_id": known,
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": len(prompt),
            "transfer_mode": "push" if pushes else "pull",
        }
        lent |= {} if pushes else {"remote_prefill_cached_tokens": cached}
        offer = {"pdrelay_first_token": {"apis": ["completions", "chat"], "max_model_len": 4096}}
        return lent | (offer if fleet.offers and not pushes else {})

    async def _load(self, params, body):
        """Return the tokens whose KV comes; None: it does not come, or is refused: it is another model's."""
        pushed = params.get("transfer_mode") == "push"
        key = params["remote_engine_id"], params["transfer_id" if pushed else "remote_request_id"]
        for _ in range(int(LEASE_S / 0.25) if pushed else 0):
            if key in self.fleet.kv:
                break
            await asyncio.sleep(0.25)
        weights, salt, tokens = self.fleet.kv.pop(key, (None, None, None))
        is_own = salt == body.get("cache_salt")  # another tenant's makes another text
        return None if weights != body["weights"] else tokens if is_own else [token + 1 for token in tokens]


def _same(one, other):
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


class Line(asyncio.Protocol):
    """A connection of an engine: reads requests, and lets the fate of each answer happen."""

    def __init__(self, engine):
        self._engine = engine
        self._read = b""
        self._task = None
        self._idle = None  # the timer that closes it
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    def connection_made(self, transport):
        self.transport = transport
        self._engine.lines[self] = None

    def connection_lost(self, _):
        self._engine.lines.pop(self, None)
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self):
        self._goes_on.clear()

    def resume_writing(self):
        self._goes_on.set()

    def data_received(self, data):
        self._read += data
        self._begin()

    def _begin(self):
        head, found, body = self._read.partition(b"\r\n\r\n")
        if not found or self._task is not None:
            return
        if self._idle is not None:
            self._idle.cancel()
        (method, path, _), *pairs = (line.split(b" ", 2) for line in head.split(b"\r\n"))
        headers = {pair[0]: b" ".join(pair[1:]) for pair in pairs}
        if method == b"GET":
            self._read = b""
            self.transport.write(Style().whole(200, self._engine.models())[0])
        elif len(body) >= int(headers[b"content-length:"]):
            self._read = b""
            leg = path.decode(), headers[b"x-request-id:"].decode(), _fields_of(headers[b"content-type:"], body)
            self._task = asyncio.get_running_loop().create_task(self._serve(*leg))

    async def _serve(self, path, name, body):
        await self._engine.goes_on.wait()
        pieces, fate = await self._engine.answer(path, name, body)
        if fate.kind == "stall":
            pieces = pieces[: int(fate.place * (len(pieces) - 1))]  # not behind its last event
        elif fate.kind == "cut":
            size = int(fate.place * sum(map(len, pieces)))
            pieces = pieces[: int(fate.place * (len(pieces) + 1))] if fate.at_edge else _split(pieces, size)
        for _ in range(fate.cuts):
            place = self._engine.fleet.dice.randrange(len(pieces) or 1)
            if pieces and len(pieces[place]) > 1:
                at = self._engine.fleet.dice.randrange(1, len(pieces[place]))
                pieces[place : place + 1] = [pieces[place][:at], pieces[place][at:]]
        for piece in pieces:
            self.transport.write(piece)
            await asyncio.sleep(fate.pace_s)
            await self._goes_on.wait()
            await self._engine.goes_on.wait()
        if fate.kind == "cut" or (fate.kind != "stall" and self._engine.fleet.style.closes):
            self.transport.close()
        elif fate.kind != "stall":
            self._task = None
            if self._engine.fleet.idle_s is not None:
                self._idle = asyncio.get_running_loop().call_later(self._engine.fleet.idle_s, self.transport.close)
            self._begin()


def _split(pieces, size):
    """Return the first bytes of pieces."""
    kept = []
    for piece in pieces:
        kept += [piece[:size]] if size > 0 else []
        size -= len(piece)
    return kept
