"""The load generator: connections that are kept busy, and every answer compared byte for byte.

``python -m benchmarks.router.load '{"port": 8000, ...}'`` prints what it has seen as JSON. Nothing
here costs a task, a timer or a log line for a request; connections are protocols that send their
next request when an answer ends.
"""

import asyncio
import collections
import contextlib
import gc
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import uvloop
from httptools import HttpParserError, HttpResponseParser

from benchmarks.router import words
from support import proc

_COPIED = 4096  # bytes of a prompt up to which one write costs less than three
_SETTLE_S = 0.1  # seconds in which whoever served can finish what it does after an answer
_STUCK_S = 45.0  # seconds without any byte after which a run is given up
_MOST_FAULTS = 200  # after which a run is given up


class Plan(msgspec.Struct, forbid_unknown_fields=True):
    """What is asked, of whom, and how often."""

    port: int
    connections: int = 32
    prompt: int = 512  # bytes
    tokens: int = 2
    chat: bool = False
    stream: bool = True
    warm: int = 64  # requests before anything is measured
    most: int = 1_000_000  # requests that are measured
    seconds: float = 3600.0  # after which no further request is sent
    # whether a connection asks again when all have been answered, and not before
    together: bool = False
    hang_after: int = 0  # tokens after which every second request is left; 0: none
    patience: float = 0.0  # seconds in which the router may close the sockets that it needs no more
    step_s: float = 0.0  # seconds between two steps of the engines, which are at multiples of it
    router: int | None = None  # the process that is measured, and all of its session
    engines: int | None = None


class Crew:
    """All connections, what is left to ask, and what they have seen."""

    def __init__(self, plan, loop):
        self.plan, self.loop = plan, loop
        self.host = b"127.0.0.1:%d" % plan.port
        self.event_size = words.event_size(chat=plan.chat)
        self.number = 0
        self.clients = set()
        self.reconnecting = set()  # tasks
        self.faults = collections.Counter()
        self.said = []
        self.heard = time.monotonic()
        self.begin(0, 0.0)

    def begin(self, most, seconds):
        """Forget what was seen, and allow so many requests more."""
        self.left, self.until = most, time.monotonic() + seconds
        self.done = self.hung_up = self.tokens = self.open = 0
        self.first, self.gaps, self.late, self.whole = [], [], [], []  # seconds
        self.over = self.loop.create_future()

    def take(self):
        """Return the number of another request, or None: that was all."""
        if self.is_spent() or self.over.done():
            self._end_if_done()
            return None
        self.left -= 1
        self.open += 1
        self.number += 1
        return self.number

    def go_on(self, client):
        """Have a connection ask again, now or with all others: then what arrives when is the same
        for every router.
        """
        if not self.plan.together:
            client.ask()
        elif self.open == 0:
            if len(self.clients) < self.plan.connections:
                self.fault(
                    "missing",
                    f"{len(self.clients)} of {self.plan.connections} connections ask together",
                )
            for each in list(self.clients):
                each.ask()

    def is_spent(self):
        return self.left <= 0 or time.monotonic() >= self.until

    def close(self):
        """A request has come to its end, whichever."""
        self.open -= 1
        self._end_if_done()

    def _end_if_done(self):
        if self.open == 0 and self.is_spent() and not self.over.done():
            self.over.set_result(None)

    def fault(self, kind, detail=""):
        """Something is not as it must be."""
        self.faults[kind] += 1
        if len(self.said) < 3:
            self.said.append(f"{kind}: {detail}"[:400])
        if sum(self.faults.values()) >= _MOST_FAULTS and not self.over.done():
            self.over.set_result(None)

    async def connect(self):
        """Open all connections, some at a time."""
        for start in range(0, self.plan.connections, 50):
            count = min(50, self.plan.connections - start)
            await asyncio.gather(*(self.connect_one() for _ in range(count)))

    async def connect_one(self):
        _, client = await self.loop.create_connection(
            lambda: Client(self), "127.0.0.1", self.plan.port
        )
        return client

    def reconnect(self):
        """Replace a connection that is gone, and go on with another request."""
        task = self.loop.create_task(self._go_on())
        self.reconnecting.add(task)
        task.add_done_callback(self.reconnecting.discard)

    async def _go_on(self):
        try:
            client = await self.connect_one()
        except OSError as exc:
            self.fault("not reached", str(exc))
            if self.open == 0 and not self.clients and not self.over.done():
                self.over.set_result(None)
            return
        client.ask()

    async def phase(self, most, seconds):
        """Send so many requests, and wait for all of them; return the seconds that took."""
        self.begin(most, seconds)
        start = self.heard = time.monotonic()
        for client in list(self.clients):
            client.ask()
        while not self.over.done():
            await asyncio.wait((self.over,), timeout=1.0)
            if not self.over.done() and time.monotonic() - self.heard > _STUCK_S:
                self.fault("stuck", f"{self.open} requests got nothing for {_STUCK_S:g} s")
                break
        return time.monotonic() - start


class Client(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, crew):
        self.crew = crew
        self.number = None

    def connection_made(self, transport):
        self.transport = transport
        self.parser = HttpResponseParser(self)
        self.crew.clients.add(self)

    def is_usable(self):
        return not self.transport.is_closing()

    def ask(self):
        """Send the next request, if there is one."""
        crew, plan = self.crew, self.crew.plan
        if not self.is_usable():
            return
        self.number = number = crew.take()
        if number is None:
            return
        size = plan.prompt
        tokens = plan.tokens
        chat = plan.chat
        if plan.stream:
            answer = words.stream(number, tokens, chat=chat, size=size)
            self.expected, self.skip = answer.whole(), len(answer.first)
        else:
            self.expected = words.whole(number, tokens, chat=chat, size=size)
            self.skip = 0
        self.leaves = plan.hang_after if number % 2 else 0
        self.at = self.seen = 0
        self.bad = ""
        self.arrived = []  # (place, time) of tokens that came with a step of the engines
        request = words.request(
            number, host=crew.host, size=size, tokens=tokens, chat=chat, stream=plan.stream
        )
        self.sent = time.monotonic()
        if size > _COPIED:
            self.transport.writelines(request)
        else:
            self.transport.write(b"".join(request))

    def data_received(self, data):
        self.now = self.crew.heard = time.monotonic()
        if self.number is None:
            self.crew.fault("unasked", repr(data[:100]))
            self.transport.abort()
            return
        try:
            self.parser.feed_data(data)
        except HttpParserError as exc:
            self.bad = self.bad or f"broken framing: {exc!r}"
        if self.bad:
            self._fail("wrong", self.bad)
        elif self.number is None:
            self.crew.go_on(self)
        elif self.leaves and self.seen >= self.leaves:
            self.crew.hung_up += 1
            self._leave()

    def on_headers_complete(self):
        if self.parser.get_status_code() != 200:
            self.bad = f"status {self.parser.get_status_code()}"

    def on_body(self, part):
        if not self.expected.startswith(part, self.at):
            self.bad = f"{self.bad or 'other bytes'}: {part[:300]!r}"
            return
        if self.at == 0:
            self.first = self.now
        self.at += len(part)
        if self.crew.plan.stream:
            self._count((self.at - self.skip) // self.crew.event_size)

    def _count(self, seen):
        if seen <= self.seen or self.seen >= self.crew.plan.tokens:
            return
        crew = self.crew
        if self.seen:
            crew.gaps.append(self.now - self.last)
            if crew.plan.step_s:
                self.arrived.append((seen, self.now))
        self.seen = min(seen, crew.plan.tokens)
        self.last = self.now

    def on_message_complete(self):
        if self.bad:
            return
        if self.at != len(self.expected):
            self.bad = f"{self.at} bytes instead of {len(self.expected)}"
            return
        crew = self.crew
        crew.done += 1
        crew.tokens += crew.plan.tokens
        crew.first.append(self.first - self.sent)
        crew.whole.append(self.now - self.sent)
        if self.arrived:
            crew.late += lateness(self.arrived, crew.plan.step_s)
        if self.parser.should_keep_alive():
            self.number = None
            crew.close()
        else:
            self._leave()

    def connection_lost(self, exc):
        self.crew.clients.discard(self)
        if self.number is not None:
            self._fail(
                "lost", f"the connection ended after {self.at} of {len(self.expected)} bytes: {exc}"
            )

    def _fail(self, kind, detail):
        self.crew.fault(kind, detail)
        self._leave()

    def _leave(self):
        """Give up this connection and its request."""
        self.crew.tokens += self.seen if self.at != len(self.expected) else 0
        self.number = None
        self.transport.abort()
        self.crew.clients.discard(self)
        self.crew.reconnect()
        self.crew.close()


def lateness(arrived, step_s):
    """Return for each token of a stream how long after its step it came.

    Steps are at multiples of ``step_s``. Which one a stream began with shows in the token that was
    least late, if that one was less than a step late.
    """
    begin = min(int(now / step_s) - place for place, now in arrived)
    return [now - (begin + place) * step_s for place, now in arrived]


def peak(leader):
    """Return the most resident bytes of all times, of the processes of a session."""
    found = 0
    for pid in proc.pids_of(leader):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            found += (
                int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024 if "VmHWM" in status else 0
            )
    return found


class Watch:
    """What the processes of a run have used."""

    def __init__(self, plan):
        self.leaders = {
            name: pid for name, pid in (("router", plan.router), ("engines", plan.engines)) if pid
        }

    def cpu(self):
        """Return the CPU-seconds of each."""
        return {name: proc.cpu_seconds(pid) for name, pid in self.leaders.items()}

    def sockets(self):
        return (
            proc.sockets(SimpleNamespace(pid=self.leaders["router"]))
            if "router" in self.leaders
            else 0
        )

    async def sockets_after(self, before, patience):
        """Return the sockets that are left after the clients are gone and some seconds have
        passed.
        """
        deadline = time.monotonic() + patience
        while (left := self.sockets()) > before and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return left

    def memory(self):
        """Return the resident bytes, now and at their most."""
        if "router" not in self.leaders:
            return {}
        leader = self.leaders["router"]
        return {"rss": proc.memory(SimpleNamespace(pid=leader)), "peak": peak(leader)}


async def measure(plan):
    """Carry a plan out, and return what was seen."""
    crew = Crew(plan, asyncio.get_running_loop())
    watch = Watch(plan)
    sockets = watch.sockets()
    await crew.connect()
    if plan.warm:
        await crew.phase(plan.warm, 60.0)
        await asyncio.sleep(_SETTLE_S)
    before = watch.cpu()
    own = time.process_time()
    seconds = await crew.phase(plan.most, plan.seconds)
    await asyncio.sleep(_SETTLE_S)
    own = time.process_time() - own
    cpu = {"load": own} | {name: after - before[name] for name, after in watch.cpu().items()}
    memory = watch.memory()
    await end(crew)
    left = await watch.sockets_after(sockets, plan.patience)
    return {
        "requests": crew.done + crew.hung_up,
        "asked": crew.number,  # warming up included
        "done": crew.done,
        "hung_up": crew.hung_up,
        "tokens": crew.tokens,
        "seconds": seconds,
        "faults": dict(crew.faults),
        "said": crew.said,
        "cpu": cpu,
        "sockets": {"before": sockets, "after": left},
        **memory,
        **{name: spread(getattr(crew, name)) for name in ("first", "gaps", "late", "whole")},
    }


async def end(crew):
    """Close everything."""
    for task in list(crew.reconnecting):
        task.cancel()
    for client in list(crew.clients):
        client.number = None
        client.transport.abort()
    await asyncio.sleep(0)


def spread(values):
    """Return what is worth keeping of many numbers."""
    if not values:
        return None
    values.sort()
    last = len(values) - 1
    return {f"p{share}": values[round(last * share / 100)] for share in (50, 90, 99, 100)} | {
        "count": len(values)
    }


async def main():
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    gc.disable()  # nothing here is cyclic for long, and a pause would be taken for the router's
    print(msgspec.json.encode(await measure(plan)).decode(), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
