"""Several routers' discovery beside each other, at one API server: processes of their own, over
sockets.

The server is a program of this file: it keeps its answers ready, and spends next to nothing on
them. So this shows what the routers need, and how long each waits for the others of this machine,
and not what a real API server can serve.
"""

import asyncio
import contextlib
import itertools
import json
import sys
import time
from urllib.parse import parse_qs, urlsplit

from benchmarks import page
from benchmarks.discovery.pods import line, pages_of, pod, role_of

_AWAY_S = 1.0  # for which the API server is gone
_EVENTS, _EVENT_S = 150, 0.02  # changes of pods, and the seconds between two of them
_PATIENCE_S = 120.0


def measure(pods, *, routers):
    """Return what was seen with so many routers at a time; times in milliseconds."""
    return {str(count): asyncio.run(_beside(count, pods)) for count in routers} | {"pods": pods}


class _Api:
    """Answers LIST in pages, and WATCH with what ``push`` is given."""

    def __init__(self, pods):
        self._pages = pages_of(pods)
        self._watching, self._open = set(), set()
        self._server = None
        self.port = 0
        self.sent = 0

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self):
        """Go away, and all connections with it."""
        self._server.close()
        for writer in tuple(self._open):
            writer.transport.abort()
        await self._server.wait_closed()

    @property
    def watches(self):
        return len(self._watching)

    def push(self, event):
        for writer in self._watching:
            self._write(writer, b"%x\r\n%b\n\r\n" % (len(event) + 1, event))

    def _write(self, writer, data):
        self.sent += len(data)
        writer.write(data)

    async def _serve(self, reader, writer):
        self._open.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                query = parse_qs(urlsplit(head.split()[1].decode()).query)
                if "watch" in query:
                    self._write(writer, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                    self._watching.add(writer)
                else:
                    body = self._pages[int(query.get("continue", ["0"])[0])]
                    self._write(
                        writer,
                        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body),
                    )
                await writer.drain()
        self._watching.discard(writer)
        self._open.discard(writer)
        writer.transport.abort()


class _Follower:
    """A process that follows the pods as a router does, and says when it has seen what."""

    def __init__(self, child):
        self._child = child
        self.views = []
        self.seen = {}

    @classmethod
    async def start(cls, url):
        argv = [sys.executable, "-m", "benchmarks.discovery.follower", url]
        return cls(
            await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # each says that the server is gone
                cwd=page.ROOT,
            )
        )

    async def listen(self):
        """Take in what it says; return its last words."""
        async for said in self._child.stdout:
            what, _, value = said.decode().strip().partition(" ")
            if what == "end":
                return json.loads(value)
            name, _, at = value.partition(" ")
            if what == "view":
                self.views.append((int(name), float(at)))
            else:
                self.seen.setdefault(name, float(at))
        return None

    def end(self):
        self._child.stdin.close()

    async def close(self):
        if self._child.returncode is None:
            self._child.kill()
        await self._child.wait()


async def _beside(count, pods):
    api = _Api([pod(number, role=role_of(number)) for number in range(pods)])
    await api.start()
    followers = await asyncio.gather(
        *(_Follower.start(f"http://127.0.0.1:{api.port}") for _ in range(count))
    )
    listening = [asyncio.create_task(one.listen()) for one in followers]
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await _seen_by(followers, listening, api, pods)
    finally:
        for one in followers:
            await one.close()
        await api.stop()


async def _seen_by(followers, listening, api, pods):
    async def until(true):
        while not true():
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in listening), "a follower has ended"

    def views(number):
        return lambda: (
            api.watches == len(followers) and all(len(one.views) == number for one in followers)
        )

    await until(views(1))
    sent = api.sent
    await api.stop()
    await asyncio.sleep(_AWAY_S)
    await api.start()
    back = time.monotonic()
    await until(views(2))
    sent = api.sent - sent
    late = [(one.views[1][1] - back) * 1000 for one in followers]
    assert all(known == pods for one in followers for known, _ in one.views)

    pushed = {}
    versions = itertools.count(10**6)
    for number in range(_EVENTS):
        ready = number % 2 == 1
        one = pod(
            number // 2,
            role=role_of(number // 2),
            phase="ready" if ready else "started",
            version=next(versions),
        )
        pushed[one["metadata"]["resourceVersion"]] = time.monotonic()
        api.push(line("MODIFIED", one))
        await asyncio.sleep(_EVENT_S)
    await until(lambda: all(len(one.seen) == len(pushed) for one in followers))
    delays = sorted(
        (one.seen[name] - at) * 1000 for name, at in pushed.items() for one in followers
    )
    for one in followers:
        one.end()
    ends = await asyncio.gather(*listening)
    return {
        "bytes": sent,
        "synced_ms": {"first": min(late), "last": max(late)},
        "list_cpu_ms": sorted(end["list_cpu_ms"] for end in ends)[len(ends) // 2],
        "event_ms": {
            "p50": delays[len(delays) // 2],
            "p99": delays[len(delays) * 99 // 100],
            "most": delays[-1],
        },
    }
