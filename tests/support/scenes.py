"""A router, its engines and its client in one event loop, and what there is to see of a few requests."""

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import uvloop
from uvicorn.server import ServerState

from pdrelay_proxy import listeners
from pdrelay_proxy.app import Router, build
from pdrelay_proxy.building.engines import Fabric
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.io.log_formats import FACTS
from pdrelay_proxy.settings import Settings
from support.reciting import Act, Cast, Heard, reciting

_JSON = json.JSONDecoder(strict=False)
_SPACE = " \t\r\n"
_PATIENCE_S = float(os.environ.get("PATIENCE", "30"))


@dataclass(frozen=True)
class Sent:
    """A request of the client, in packets: seconds to wait before each, and its bytes."""

    packets: tuple[tuple[float, bytes], ...]

    def __repr__(self) -> str:
        return f"Sent({b''.join(packet for _, packet in self.packets)!r} in {len(self.packets)})"


@dataclass(frozen=True)
class Got:
    """An answer."""

    status: int
    body: bytes
    end: str  # kept, closed, or cut: the answer was not complete


@dataclass
class Seen:
    """What there is to see of a few requests, from all sides."""

    got: list[Got] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)
    facts: list[dict[str, object]] = field(default_factory=list)  # the router's lines about them
    held: dict[str, int] = field(default_factory=dict)  # what the router holds of requests that are over
    bugs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Scene:
    """A few requests of one client, and engines that know what they will say."""

    requests: tuple[Sent, ...]
    acts: Mapping[str, Sequence[Act]]
    up: Mapping[str, Sequence[bool]]
    settings: Mapping[str, object] = field(default_factory=dict)
    at_once: bool = False  # the client does not wait for an answer before the next request

    async def play(self) -> Seen:
        """Play it with a fresh router, and so one without a past."""
        logs = _Listening()
        async with logs, reciting(self.acts, self.up) as cast, routing(cast, self.settings) as served:
            got = await _converse(served, self.requests, at_once=self.at_once)
            await served.settled()
            await served.left()
            held = served.held()
        return Seen(got, cast.heard, logs.facts, held, logs.bugs)


@dataclass(frozen=True, slots=True)
class Served:
    """A router that is being served."""

    router: Router
    state: ServerState
    port: int

    async def settled(self) -> None:
        """Wait until no request is in flight."""
        admission = self.router.live.gate.admission
        await _until(lambda: self.router.lifetime.in_flight == 0 and admission.admitted == 0)

    async def left(self) -> None:
        """Wait until all clients have gone."""
        await _until(lambda: not self.state.connections)

    def held(self) -> dict[str, int]:
        """Return what it holds of requests: all of it is zero when none is under way and no client is there."""
        admission, registry = self.router.live.gate.admission, self.router.live.registry
        slots = [registry.get(engine.id).load.in_flight for role in Role for engine in registry.known(role)]
        return {
            "requests": len(list(self.router.requests)),
            "in flight": self.router.lifetime.in_flight,
            "admitted": admission.admitted,
            "waiting": admission.waiting,
            "bytes": admission.held_bytes,
            "slots": sum(slots),
        }


@asynccontextmanager
async def routing(
    cast: Cast, options: Mapping[str, object], clock: Callable[[], float] = time.monotonic, **patience: float
) -> AsyncGenerator[Served]:
    """Serve a router as its process does, but for signals and the clock of uvicorn's server.

    ``patience``: with its clients, where it is another than the router's usual one.
    """
    at = {role: tuple(cast.at[role]) for role in ("prefill", "decode")}
    settings = Settings(**({"health_check_interval_s": 0.0, "allowed_hosts": ("*",)} | at | dict(options)))
    router = build(settings, fabric=Fabric(clock=clock))
    config = listeners.main_config(router, settings, **patience)
    config.load()
    state = ServerState()
    state.default_headers = [(b"date", b"today")]
    async with router.app.router.lifespan_context(router.app):
        protocol = partial(config.http_protocol_class, config=config, server_state=state, app_state={})
        listener = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0, ssl=router.tls)
        try:
            yield Served(router, state, listener.sockets[0].getsockname()[1])
        finally:
            listener.close()
            for connection in tuple(state.connections):
                connection.shutdown()
            await _until(lambda: not state.connections and not state.tasks)


async def _limited(scene: Coroutine[Any, Any, Any], seconds: float) -> Any:
    async with asyncio.timeout(seconds):
        return await scene


def run(scene: Coroutine[Any, Any, Any], *, seconds: float) -> Any:
    """Run a scene in an event loop like that of the process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_limited(scene, seconds))


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not true():
            await asyncio.sleep(0.0005)


class _Listening(logging.Handler):
    """Collects what a router says."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.facts: list[dict[str, object]] = []
        self.bugs: list[str] = []
        self._loggers = [
            logging.getLogger(name) for name in ("pdrelay_proxy", "pdrelay.access", "uvicorn.error", "asyncio")
        ]

    async def __aenter__(self) -> Self:
        self._levels = [logger.level for logger in self._loggers]
        for logger in self._loggers:
            logger.addHandler(self)
            logger.setLevel(logging.INFO if logger.name.startswith("pdrelay") else logging.WARNING)
        return self

    async def __aexit__(self, *_: object) -> None:
        for logger, level in zip(self._loggers, self._levels, strict=True):
            logger.removeHandler(self)
            logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        facts = getattr(record, FACTS, None)
        if facts is not None:
            self.facts.append(facts)
        elif record.levelno >= logging.ERROR:
            self.bugs.append(logging.Formatter().format(record))


# The client


class _Over(Exception):
    """The connection has ended before an answer."""


async def _converse(served: Served, requests: Sequence[Sent], *, at_once: bool) -> list[Got]:
    """Send the requests over one connection, or over another one where the router has closed it."""
    got: list[Got] = []
    left = list(requests)
    while left:
        before = len(left)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=2**24)
        try:
            sending = asyncio.create_task(_send(writer, left[:] if at_once else left[:1]))
            while left:
                got.append(await asyncio.wait_for(answer(reader), _PATIENCE_S))
                left.pop(0)
                if got[-1].end != "kept":
                    break
                if left and not at_once:
                    await sending
                    await served.settled()
                    sending = asyncio.create_task(_send(writer, left[:1]))
            if got[-1].end == "kept":
                await sending  # an answer may come before the end of its request
                await served.settled()
                writer.write_eof()
                assert await asyncio.wait_for(reader.read(), _PATIENCE_S) == b"", "something follows the last answer"
        except _Over:
            got.append(Got(0, b"", "no answer"))
            left.pop(0)
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await sending
            writer.transport.abort()
        assert len(left) < before
    return got


async def _send(writer: asyncio.StreamWriter, requests: Sequence[Sent]) -> None:
    for sent in requests:
        for pause_s, packet in sent.packets:
            if pause_s:
                await asyncio.sleep(pause_s)
            writer.write(packet)
            with suppress(ConnectionError):
                await writer.drain()


async def answer(reader: asyncio.StreamReader) -> Got:
    """Read the answer to one request."""
    try:
        while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100"):
            pass  # whether it is sent depends on what has come by then
    except (asyncio.IncompleteReadError, ConnectionError) as exc:
        raise _Over from exc
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    assert re.fullmatch(r"HTTP/1\.1 [1-5][0-9][0-9] .*", first), first
    pairs = [line.split(": ", 1) for line in lines]
    fields = dict(pairs)
    assert len(fields) == len(pairs), f"a header stands there twice: {head!r}"
    body, end = await _body(reader, fields)
    if end == "kept" and fields.get("connection") == "close":
        with suppress(ConnectionError):  # it had not read all of the request
            assert await reader.read() == b"", "something follows the answer"
        end = "closed"
    return Got(int(first.split()[1]), body, end)


async def _body(reader: asyncio.StreamReader, fields: Mapping[str, str]) -> tuple[bytes, str]:
    body = b""
    try:
        if "content-length" in fields:
            assert "transfer-encoding" not in fields
            return await reader.readexactly(int(fields["content-length"])), "kept"
        if fields.get("transfer-encoding") != "chunked":
            return await reader.read(), "closed"
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            assert await reader.readexactly(2) == b"\r\n"
        assert await reader.readexactly(2) == b"\r\n"
    except (asyncio.IncompleteReadError, ConnectionError):
        return body, "cut"
    return body, "kept"


async def metrics_of(port: int) -> dict[str, str]:
    """Return what the router has counted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    got = await answer(reader)
    writer.transport.abort()
    lines = [line for line in got.body.decode().splitlines() if not line.startswith("#")]
    return dict(line.rsplit(" ", 1) for line in lines)


# Requests


def post(body: bytes, *lines: bytes, path: bytes = b"/v1/completions", start: bytes | None = None) -> bytes:
    """Return a request; ``lines`` are its headers but for Host and its length, and for JSON its type."""
    start = start or b"POST %b HTTP/1.1" % path
    lines = declared(lines)
    return b"\r\n".join([start, b"Host: localhost", *lines, b"Content-Length: %d" % len(body), b"", body])


def declared(lines: Sequence[bytes]) -> Sequence[bytes]:
    """Return headers of which one says the type of the body."""
    is_declared = any(line.lower().startswith(b"content-type") for line in lines)
    return lines if is_declared else (*lines, b"Content-Type: application/json")


def values_of(body: bytes) -> dict[str, bytes]:
    """Return the values of a JSON object as they are written; of several with one name the last counts."""
    left = body.decode("utf-8", "surrogateescape")
    pos = _blank(left, _blank(left, 0, "{"), "")
    found = {}
    while left[pos] != "}":
        name, pos = _JSON.raw_decode(left, pos)
        start = _blank(left, pos, ":")
        _, pos = _JSON.raw_decode(left, start)
        found[name] = left[start:pos].encode("utf-8", "surrogateescape")
        pos = _blank(left, pos, "," if left[_blank(left, pos, "")] == "," else "")
    assert not left[pos + 1 :].strip(_SPACE), left
    return found


def _blank(text: str, pos: int, mark: str) -> int:
    """Return where the next word is, behind this mark and the spaces around it."""
    while text[pos] in _SPACE:
        pos += 1
    assert text.startswith(mark, pos), text
    pos += len(mark)
    while text[pos] in _SPACE:
        pos += 1
    return pos


def text(**fields: object) -> bytes:
    """Return a body as most clients send it."""
    return json.dumps({"model": "tiny", "prompt": "once upon", "max_tokens": 4} | fields).encode()
