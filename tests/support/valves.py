"""TCP relays in front of engines: a test sees requests and answers pass, holds them, and breaks connections off.

A valve knows just enough of HTTP/1.1 to count: on one connection the router sends its next request only after the
answer to the last one, so the first bytes after an answer are a new request, and the first ones after that its answer.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from support.cluster import free_ports


class Passing(StrEnum):
    """What a valve sees."""

    REQUEST = "request"  # before its first byte is passed on
    ANSWER = "answer"  # the same


@dataclass
class _Trap:
    """Something to do once, when a number of requests or answers has passed."""

    what: Passing
    number: int  # the first one is 1
    act: Callable[[], object]
    after: float  # seconds


@dataclass
class Valve:
    """The relay of one engine. Its methods may be called from any thread."""

    host: str
    port: int  # of the engine
    loop: asyncio.AbstractEventLoop
    own_port: int = field(default_factory=lambda: free_ports(1)[0])
    seen: dict[Passing, int] = field(default_factory=lambda: dict.fromkeys(Passing, 0))
    shut: bool = False  # every new connection is reset at once
    _traps: list[_Trap] = field(default_factory=list)
    _pipes: set["_Pipe"] = field(default_factory=set)
    _held: set[Passing] = field(default_factory=set)
    _waiting: list[Callable[[], None]] = field(default_factory=list)

    @property
    def address(self):
        """Where the router finds the engine."""
        return f"127.0.0.1:{self.own_port}"

    def on(self, what, number, act, *, after=0.0):
        """Do something once, so many seconds after the ``number``-th from now has come here."""
        self._traps.append(_Trap(what, self.seen[what] + number, act, after))

    def reset(self):
        """Break every connection off, with a reset to both sides, as when a host vanishes behind a firewall."""
        self.loop.call_soon_threadsafe(self._reset)

    def close(self):
        """Reset what there is, and whatever comes, until :meth:`open`."""
        self.shut = True
        self.reset()

    def open(self):
        self.shut = False

    def answer_instead(self, data):
        """Send this in place of the answers to all requests that are here now."""
        self.loop.call_soon_threadsafe(self._answer_instead, data)

    def hold(self, what):
        """Keep all of these here, until :meth:`release`."""
        self._held.add(what)

    def release(self):
        self._held.clear()
        self.loop.call_soon_threadsafe(self._go_on)

    def passing(self, what, go_on):
        """One of them is here: count, spring what was waiting for it, and let it go on unless it is held."""
        self.seen[what] += 1
        for trap in [trap for trap in self._traps if (trap.what, trap.number) == (what, self.seen[what])]:
            self._traps.remove(trap)
            if trap.after:
                self.loop.call_later(trap.after, trap.act)
            else:
                trap.act()
        if what in self._held:
            self._waiting.append(go_on)
        else:
            go_on()

    def connected(self, pipe):
        self._pipes.add(pipe)

    def gone(self, pipe):
        self._pipes.discard(pipe)

    def _answer_instead(self, data):
        for pipe in self._pipes:
            if pipe.is_asked:
                pipe.instead = data

    def _go_on(self):
        waiting = self._waiting
        self._waiting = []
        for go_on in waiting:
            go_on()

    def _reset(self):
        for pipe in list(self._pipes):
            pipe.reset()


class _Pipe(asyncio.Protocol):
    """The router's side of one connection."""

    def __init__(self, valve):
        self._valve = valve
        self._expects = Passing.REQUEST  # whose first bytes come next
        self._is_probe = False  # probes are not held and not counted
        self._backlog = {Passing.REQUEST: b"", Passing.ANSWER: b""}  # what waits, in either direction
        self._is_open = {Passing.REQUEST: False, Passing.ANSWER: False}
        self._router = self._engine = None
        self._has_ended = False  # the engine's connection, behind an answer that is held
        self.instead = None  # what the router gets in place of the answer

    @property
    def is_asked(self):
        """Whether there is a request whose answer the router has not begun to get."""
        held = bool(self._backlog[Passing.ANSWER])
        return not self._is_probe and (held or self._expects is Passing.ANSWER)

    def connection_made(self, transport):
        self._router = transport
        self._valve.connected(self)
        if self._valve.shut:
            self.reset()

    def data_received(self, data):
        """The router has sent something."""
        self._backlog[Passing.REQUEST] += data
        if self._expects is Passing.REQUEST:
            self._expects, self._is_probe = Passing.ANSWER, data.startswith(b"GET ")
            self._see(Passing.REQUEST)
        self._flush()

    def from_engine(self, data):
        self._backlog[Passing.ANSWER] += data
        if self._expects is Passing.ANSWER:
            self._expects = Passing.REQUEST
            self._see(Passing.ANSWER)
        self._flush()

    def _see(self, what):
        self._is_open[what] = self._is_probe
        if not self._is_probe:
            self._valve.passing(what, lambda: self._let_through(what))

    def _let_through(self, what):
        self._is_open[what] = True
        self._flush()

    def _flush(self):
        if self._is_open[Passing.ANSWER] and self._backlog[Passing.ANSWER]:
            answer = self._take(Passing.ANSWER)
            self._router.write(self.instead or answer)
            if self.instead is not None or self._has_ended:
                self._router.close()
        if self._is_open[Passing.REQUEST] and self._backlog[Passing.REQUEST]:
            if self._engine is None:  # a held request waits here: engines close what is idle for five seconds
                self._engine = _Far(self)
                self._connecting = asyncio.ensure_future(self._connect(self._engine))
            elif self._engine.transport is not None:
                self._engine.transport.write(self._take(Passing.REQUEST))

    def _take(self, what):
        taken = self._backlog[what]
        self._backlog[what] = b""
        return taken

    async def _connect(self, far):
        try:
            await self._valve.loop.create_connection(lambda: far, self._valve.host, self._valve.port)
        except OSError:
            self.reset()

    def engine_is_here(self, transport):
        if self._router.is_closing():
            transport.abort()
        self._flush()

    def connection_lost(self, exc):
        self._valve.gone(self)
        if self._engine is not None and self._engine.transport is not None:
            self._engine.transport.abort()

    def engine_has_gone(self, exc):
        """Between two requests that concerns nobody: the next one gets another connection."""
        self._engine = None
        if exc is not None:
            self.reset()
        elif self._backlog[Passing.ANSWER]:  # engines close what is idle for five seconds: an answer may be held longer
            self._has_ended = True
        elif self._expects is Passing.ANSWER or not self._is_open[Passing.ANSWER]:
            self._router.close()

    def reset(self):
        """Close both sides with RST."""
        far = None if self._engine is None else self._engine.transport
        for transport in filter(None, (self._router, far)):
            with contextlib.suppress(OSError, AttributeError):
                linger = struct.pack("ii", 1, 0)
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            transport.abort()


class _Far(asyncio.Protocol):
    """The engine's side."""

    def __init__(self, pipe):
        self._pipe = pipe
        self.transport = None

    def connection_made(self, transport):
        self.transport = transport
        self._pipe.engine_is_here(transport)

    def data_received(self, data):
        self._pipe.from_engine(data)

    def connection_lost(self, exc):
        self._pipe.engine_has_gone(exc)


@contextlib.contextmanager
def open_valves(specs):
    """Give each engine a valve: a list in the same order."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="valves")
    thread.start()
    valves = [Valve(spec.host, spec.port, loop) for spec in specs]

    async def listen():
        return [await loop.create_server(lambda v=v: _Pipe(v), "127.0.0.1", v.own_port) for v in valves]

    async def end(servers):
        for server in servers:
            server.close()
        for valve in valves:
            valve._reset()
        await asyncio.sleep(0.05)

    servers = asyncio.run_coroutine_threadsafe(listen(), loop).result(10)
    try:
        yield valves
    finally:
        asyncio.run_coroutine_threadsafe(end(servers), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
