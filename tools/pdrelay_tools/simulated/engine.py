"""A simulated vLLM engine: its HTTP API, its rules for both legs, and faults on demand.

Run one with ``python -m pdrelay_tools.simulated.engine --role prefill --port 8100 --model tiny``.
``POST /sim/faults`` sets a :class:`SimulatedFault` (``null`` clears it), and ``GET /sim/log`` shows
the requests that the engine received.
"""

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS
from pdrelay_tools.simulated import rules
from pdrelay_tools.simulated.loads import SimulatedLoads
from pdrelay_tools.simulated.prefix_cache import PrefixCache
from pdrelay_tools.simulated.replies import (
    MessagesReplies,
    Replies,
    ResponsesReplies,
    TokensReplies,
    error,
    event,
)
from pdrelay_tools.simulated.rules import Json

AnyReplies: TypeAlias = Replies | ResponsesReplies | MessagesReplies | TokensReplies

_AUTO: Final = "auto"
_TRANSPORT: Final = "pdrelay.sim.transport"
# tokens of all answers: more are refused; so many take a fifth of a second
_TOO_MANY: Final = 200_000
# The fields of each path that limit the number of tokens: they must be 1 in a prefill leg.
_LIMITS: Final = {
    "/v1/completions": ("max_tokens", "min_tokens"),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens", "min_tokens"),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
    "/inference/v1/generate": ("max_tokens", "min_tokens"),
}


class FaultKind(StrEnum):
    """Ways to fail."""

    STATUS = "status"  # answer with an HTTP error
    STALL = "stall"  # fall silent
    DROP = "drop"  # close the connection
    ERROR_EVENT = "error_event"  # send an error in place of an event and then [DONE], as vLLM does
    END = "end"  # end the stream early, as if that were all
    WRONG = "wrong"  # answer with the text of another prompt, as from wrong KV
    KEEP = "keep"  # prefill: show every lease as held, for ever
    ILL = "ill"  # fail health checks from the first request on, and nothing else
    MUTE = "mute"  # answer for metrics with an error from the first request on, and nothing else
    FORGET = "forget"  # prefill: leave `names` out of the kv_transfer_params


@dataclass(frozen=True, slots=True)
class SimulatedFault:
    """One way to fail, at one point of an answer."""

    kind: FaultKind
    # events that are sent first; None: not even a head. A whole body: half of it is sent
    after: int | None = None
    status: int = 500  # of STATUS, and inside ERROR_EVENT
    body: str | None = None  # of STATUS; None: what vLLM would say
    names: tuple[str, ...] = ()
    times: int | None = None  # how many requests it hits; None: all
    passes: int = 0  # how many requests are served well before that


@dataclass(slots=True)
class LogEntry:
    """One request that arrived, and its state: open, done or hung up."""

    path: str
    headers: dict[str, str]
    body: str
    state: str = "open"
    cached: int | None = None  # tokens of its prompt that were in the engine's cache, if it has one


@dataclass(frozen=True, slots=True)
class KvNetwork:
    """The network between simulated engines; see ``Sim``."""

    pushed: dict[tuple[str, str], str] | None
    seconds: Mapping[str, float]


class Sim:
    """One engine, as an ASGI application. Delays are seconds.

    ``role``: prefill, decode, or both (kv_both), which serves legs of both kinds. ``aliases``: more
    names of its model. ``mode``: in auto each prefill leg says whether it pushes. ``offers``:
    clients may get the prefill engine's token. ``cache_blocks``: it publishes KV events of a prefix
    cache of that size; 0: none.

    ``pushed``: the KV that prefill engines have written in push mode, by engine and transfer;
    decode engines that share it wait for theirs. Without it (engines of several processes) they
    trust the params, and answer at once. ``moves_s``: how long a transfer takes, in pull and in
    push.
    """

    def __init__(
        self,
        role: str,
        *,
        model: str = "sim",
        aliases: Collection[str] = (),
        prefill_s: float = 0.0,
        token_s: float = 0.0,
        mode: str = "pull",
        offers: bool = False,
        pushed: dict[tuple[str, str], str] | None = None,
        cache_blocks: int = 0,
        moves_s: Mapping[str, float] | None = None,
    ) -> None:
        self.role = role
        self.engine_id = _new_engine_id()
        self.log: list[LogEntry] = []
        self.violations: list[str] = []
        # leases of a prefill engine: its request, and the transfer
        self.granted: list[tuple[str, str | None]] = []
        # Events of each request, as the connector's route shows them; None: it has no such route.
        self.timelines: dict[str, list[Json]] | None = None
        self.loads = SimulatedLoads()
        self._names = (model, *aliases)  # the first one is in its answers
        self._prefill_s = prefill_s
        self._token_s = token_s
        self._fault: SimulatedFault | None = None
        self._hits = 0
        self._used: set[bytes] = set()
        self._mode = mode
        self._offers = offers
        self._network = KvNetwork(pushed, moves_s or {})
        self.cache = PrefixCache(cache_blocks) if cache_blocks else None
        routes = [
            Route("/health", self._health),
            Route("/version", _version),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/pdrelay/kv_events", self._kv_events),
            Route("/v1/pdrelay/requests/{name}", self._timeline),
            *(Route(path, self._generate, methods=["POST"]) for path in _LIMITS),
            *(
                Route(path, self._run, methods=["POST"])
                for path in ENDPOINTS.keys() - _LIMITS.keys()
            ),
            Route("/sim/faults", self._set_fault, methods=["POST"]),
            Route("/sim/log", self._show_log),
        ]
        self._app = Starlette(routes=routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, with its transport in the scope: ASGI cannot drop a connection."""
        scope[_TRANSPORT] = getattr(getattr(send, "__self__", None), "transport", None)
        await self._app(scope, receive, send)

    def inject(self, fault: SimulatedFault | None) -> None:
        """Fail like this from now on; None: work again."""
        self._fault = fault
        self._hits = 0

    def restart(self) -> None:
        """Have a new engine id, empty counters and an empty cache, at the same address."""
        self.engine_id = _new_engine_id()
        self.loads.clear()
        if self.cache is not None:
            self.cache.clear()

    async def _health(self, _: Request) -> Response:
        is_ill = self._fault is not None and self._fault.kind is FaultKind.ILL and bool(self.log)
        return Response(status_code=503 if is_ill else 200)

    async def _metrics(self, _: Request) -> Response:
        if self._fault is not None and self._fault.kind is FaultKind.MUTE and self.log:
            return Response(status_code=500)
        running = sum(entry.state == "open" for entry in self.log)
        labels = f'{{model_name="{self._names[0]}",engine="0"}}'
        gauges = {
            "num_requests_running": running,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": self._held_share(),
        }
        lines = [
            f"# TYPE vllm:{name} gauge\nvllm:{name}{labels} {value}\n"
            for name, value in gauges.items()
        ]
        lines.append(self.loads.exposition(self.engine_id, labels[1:-1]))
        if self._mode == _AUTO:
            info = f'vllm:pdrelay_connector_info{{{labels[1:-1]},engine_id="{self.engine_id}",mode="{_AUTO}"}} 1.0\n'
            lines.append(info)
        return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")

    def _held_share(self) -> float:
        keeps = self._fault is not None and self._fault.kind is FaultKind.KEEP
        return min(1.0, len(self.granted) / 1000) if keeps else 0.0

    async def _models(self, _: Request) -> Response:
        card = {"object": "model", "created": 0, "owned_by": "vllm", "max_model_len": 2048}
        return _json({"object": "list", "data": [{"id": name, **card} for name in self._names]})

    async def _kv_events(self, _: Request) -> Response:
        if self.cache is None:
            return _json(error(404, "this engine publishes no KV events"), 404)
        return StreamingResponse(self.cache.frames(), media_type="application/x-pdrelay-kv-events")

    async def _timeline(self, request: Request) -> Response:
        if self.timelines is None:
            return _json(error(404, "this engine keeps no timelines"), 404)
        name = request.path_params["name"]
        events = self.timelines.get(name)
        return _json(
            {"requests": [] if events is None else [{"id": f"cmpl-{name}-0", "events": events}]}
        )

    async def _set_fault(self, request: Request) -> Response:
        try:
            self.inject(msgspec.json.decode(await request.body(), type=SimulatedFault | None))
        except msgspec.DecodeError as exc:
            return _json(error(400, f"not a fault: {exc}"), 400)
        return _json({"fault": self._fault})

    async def _show_log(self, _: Request) -> Response:
        return _json(
            {"requests": [asdict(entry) for entry in self.log], "violations": self.violations}
        )

    async def _generate(self, request: Request) -> Response:
        try:
            raw, entry = await self._logged(request)
        except ClientDisconnect:  # in the middle of its body
            return Response(status_code=499)
        try:
            response = await self._answer(request, raw, entry)
        except ClientDisconnect:
            entry.state = "hung up"
            return Response(status_code=499)
        if not isinstance(response, StreamingResponse):
            entry.state = "done"
        return response

    async def _logged(self, request: Request) -> tuple[bytes, LogEntry]:
        raw = await request.body()
        entry = LogEntry(request.url.path, dict(request.headers), raw.decode("utf-8", "replace"))
        self.log.append(entry)
        return raw, entry

    async def _answer(self, request: Request, raw: bytes, entry: LogEntry) -> Response:
        fault = self._due()
        if fault is not None and (failed := await _fail_at_once(request, fault)) is not None:
            return failed
        try:
            body, generated = rules.continued(json.loads(raw))
            if rules.answer_tokens(body) > _TOO_MANY:
                return _json(error(400, "max_tokens is larger than the model's length"), 400)
            if rules.token_limit(body) < 1:
                return _json(error(400, "max_tokens must be at least 1"), 400)
            if not (transfer := rules.abandoned(body)):
                self._check(raw, body, request)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            return _json(error(400, f"not a request: {exc!r}"), 400)
        except rules.Violation as exc:
            self.violations.append(str(exc))
            return _json(error(400, str(exc)), 400)
        if (body.get("model") or self._names[0]) not in self._names:
            return _json(error(404, f"The model `{body['model']}` does not exist."), 404)
        if fault is not None and fault.kind is FaultKind.WRONG:
            body = rules.of_another_prompt(body)
            fault = None
        replies = self._replies(request, body, generated)
        self._use_cache(body, generated, entry)
        if self._prefills(body):
            return await self._prefill(request, replies, fault, abandoned=transfer)
        return await self._decode(request, replies, entry, fault)

    async def _decode(
        self, request: Request, replies: AnyReplies, entry: LogEntry, fault: SimulatedFault | None
    ) -> Response:
        body = replies.body
        await self._receive(request, body)
        if not self.loads.load(body):
            return _json(error(500, "EngineCore encountered an issue"), 500)
        if body.get("stream"):
            events = _events(request, replies, entry, fault, lambda: self._token_s)
            return StreamingResponse(events, media_type="text/event-stream")
        await _pause(request, self._token_s * rules.token_limit(body))
        return _whole(request, replies, entry, fault)

    def _use_cache(self, body: Json, generated: int, entry: LogEntry) -> None:
        if self.cache is None or not (ids := rules.ids_of(body, generated)):
            return
        entry.cached = self.cache.use(ids, body.get("cache_salt"))
        if not self._prefills(body):
            self.cache.use([*ids, *rules.generated_ids(body, generated)], body.get("cache_salt"))

    def _replies(self, request: Request, body: Json, generated: int) -> AnyReplies:
        name = _request_id(request)
        created = int(time.time())  # noqa: TID251 (an epoch)
        match request.url.path:
            case "/v1/responses":
                return ResponsesReplies(body, name, self._names[0], created)
            case "/v1/messages":
                return MessagesReplies(body, name, self._names[0], created)
            case "/inference/v1/generate":
                return TokensReplies(body, name, self._names[0], created)
            case path:
                return Replies(
                    body, name, self._names[0], created, path.startswith("/v1/chat/"), generated
                )

    async def _run(self, request: Request) -> Response:
        """Answer a request that has no second leg with its path and size."""
        raw, entry = await self._logged(request)
        if (fault := self._due()) is not None and (
            failed := await _fail_at_once(request, fault)
        ) is not None:
            return failed
        entry.state = "done"
        return _json({"object": "list", "path": request.url.path, "bytes": len(raw)})

    async def _prefill(
        self,
        request: Request,
        replies: AnyReplies,
        fault: SimulatedFault | None,
        *,
        abandoned: str | None,
    ) -> Response:
        if abandoned:
            return _json(replies.whole())
        await _pause(request, self._prefill_s)
        forget = fault.names if fault is not None else ()
        body = replies.body
        name = self.engine_id
        mode = (
            body["kv_transfer_params"].get("transfer_mode", "pull")
            if self._mode == _AUTO
            else self._mode
        )
        offers = self._offers and (self._mode, mode) != (_AUTO, "push")
        params = rules.make_params(
            body, replies.request_id, name=name, mode=mode, offers=offers, forget=forget
        )
        lease: Json = msgspec.json.decode(params)
        self.granted.append(
            (lease.get("remote_request_id", ""), body["kv_transfer_params"].get("transfer_id"))
        )
        if self._network.pushed is not None and mode == "push":
            transfer = replies.body["kv_transfer_params"]["transfer_id"]
            self._network.pushed[self.engine_id, transfer] = rules.identity(replies.body)
        return _json(replies.whole() | {"kv_transfer_params": params})

    async def _receive(self, request: Request, body: Json) -> None:
        """Wait until the KV is here: for a transfer's time, and for the write of a push."""
        params: Json = body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill") and (
            seconds := self._network.seconds.get(params.get("transfer_mode", "pull"))
        ):
            await _pause(request, seconds)
        if self._network.pushed is None or params.get("transfer_mode") != "push":
            return
        key = params["remote_engine_id"], params["transfer_id"]
        while key not in self._network.pushed:
            await _pause(request, 0.001)
        if self._network.pushed.pop(key) != rules.identity(body):
            self.violations.append("the KV cache that was pushed belongs to another request")

    def _check(self, raw: bytes, body: Json, request: Request) -> None:
        if not rules.prompts_of(body) or rules.token_limit(body) < 0:
            raise ValueError("no prompt, or no tokens")
        if not isinstance(body.get("stream_options"), dict | None):
            raise TypeError("stream_options is no object")
        if self._prefills(body):
            rules.check_prefill_leg(
                body, pushes=self._mode == "push", limits=_LIMITS[request.url.path]
            )
        elif body.get("kv_transfer_params") is not None and [*body["kv_transfer_params"]] != [
            "prompt_token_ids"
        ]:
            self._check_decode(raw, body, _request_id(request))

    def _prefills(self, body: Json) -> bool:
        """Tell whether a request is a prefill leg: an engine of role both gets both kinds."""
        if self.role != "both":
            return self.role == "prefill"
        params: Json = body.get("kv_transfer_params") or {}
        return bool(params.get("do_remote_decode")) or rules.abandoned(body) is not None

    def _check_decode(self, raw: bytes, body: Json, request_id: str) -> None:
        if body["kv_transfer_params"].get("remote_engine_id") == self.engine_id:
            raise rules.Violation("this engine has computed the prompt itself")
        params = bytes(msgspec.json.decode(raw, type=dict[str, msgspec.Raw])["kv_transfer_params"])
        if body["kv_transfer_params"].get("transfer_mode") == "push":
            rules.check_push_leg(body, request_id)
        else:
            rules.check_decode_leg(msgspec.Raw(params), body, request_id)
        if params in self._used:
            raise rules.Violation("the kv_transfer_params were used twice")
        self._used.add(params)

    def _due(self) -> SimulatedFault | None:
        """Return the fault that hits this request."""
        fault = self._fault
        if fault is None or (fault.times is not None and self._hits >= fault.passes + fault.times):
            return None
        self._hits += 1
        return fault if self._hits > fault.passes else None


async def _version(_: Request) -> Response:
    return _json({"version": "0.32.0"})


async def _fail_at_once(request: Request, fault: SimulatedFault) -> Response | None:
    """Fail before the response begins, if that is the fault."""
    if fault.kind is FaultKind.STATUS:
        body = json.dumps(error(fault.status, "injected")) if fault.body is None else fault.body
        return Response(body, fault.status, media_type="application/json")
    if fault.after is None and fault.kind is FaultKind.STALL:
        await _pause(request, None)
    if fault.after is None and fault.kind is FaultKind.DROP:
        await _drop(request)
        return Response()
    return None


async def _events(
    request: Request,
    replies: AnyReplies,
    entry: LogEntry,
    fault: SimulatedFault | None,
    token_s: Callable[[], float],
) -> AsyncGenerator[bytes]:
    """Stream an answer to its end, its fault, or the client's hang-up, and log which it was."""
    try:
        for place, piece in enumerate(replies.events()):
            if fault is not None and place == (fault.after or 0):
                if fault.kind is FaultKind.STALL:
                    await asyncio.Event().wait()
                elif fault.kind is FaultKind.DROP:
                    yield b'data: {"id": "half of an ev'
                    await _drop(request)
                elif fault.kind is FaultKind.ERROR_EVENT:
                    yield event(error(fault.status, "injected"))
                    yield b"data: [DONE]\n\n"
                entry.state = "done"
                return
            yield piece
            await asyncio.sleep(token_s())
        if replies.end:
            yield replies.end
        entry.state = "done"
    finally:
        if entry.state == "open":
            entry.state = "hung up"


def _whole(
    request: Request, replies: AnyReplies, entry: LogEntry, fault: SimulatedFault | None
) -> Response:
    body = msgspec.json.encode(replies.whole() | {"kv_transfer_params": None})
    if fault is None or fault.kind is not FaultKind.DROP:
        return Response(body, media_type="application/json")

    async def half() -> AsyncGenerator[bytes]:
        yield body[: len(body) // 2]
        await _drop(request)
        entry.state = "done"

    return StreamingResponse(
        half(), headers={"content-length": str(len(body))}, media_type="application/json"
    )


async def _pause(request: Request, seconds: float | None) -> None:
    """Wait so long (None: for ever); raises ClientDisconnect when the client hangs up."""
    if seconds == 0:
        return
    try:
        async with asyncio.timeout(seconds):
            while (await request.receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        return
    raise ClientDisconnect


async def _drop(request: Request) -> None:
    await asyncio.sleep(0.01)  # until earlier bytes are sent
    if (transport := request.scope[_TRANSPORT]) is not None:
        transport.abort()


def _new_engine_id() -> str:
    return f"sim-{uuid.uuid4().hex[:8]}"


def _request_id(request: Request) -> str:
    return request.headers.get("x-request-id") or uuid.uuid4().hex


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one engine until it is told to stop."""
    parser = argparse.ArgumentParser(
        prog="python -m pdrelay_tools.simulated.engine", description="A pretended vLLM engine."
    )
    parser.add_argument("--role", choices=["prefill", "decode", "both"], required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="sim")
    parser.add_argument("--mode", choices=["pull", "push", _AUTO], default="pull")
    parser.add_argument(
        "--prefill-delay", type=float, default=0.0, metavar="S", help="seconds a prompt takes"
    )
    parser.add_argument(
        "--token-delay", type=float, default=0.0, metavar="S", help="seconds a token takes"
    )
    parser.add_argument(
        "--cache-blocks", type=int, default=0, metavar="N", help="of a prefix cache that is told of"
    )
    args = parser.parse_args(argv)
    sim = Sim(
        args.role,
        model=args.model,
        prefill_s=args.prefill_delay,
        token_s=args.token_delay,
        mode=args.mode,
        cache_blocks=args.cache_blocks,
    )
    uvicorn.run(sim, host=args.host, port=args.port, log_level="warning", timeout_keep_alive=5)


if __name__ == "__main__":  # pragma: no cover
    main()
