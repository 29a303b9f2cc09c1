"""Engines that recite: what they answer is written down beforehand, byte for byte, with every pause and every end.

They are asyncio servers on real sockets, in the event loop of who asks. Of each role the next request gets the next
act, whichever engine it comes to; when there are no more acts, an answer that is good.
"""

import asyncio
import json
import os
import re
import socket
import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum

_LIMIT = 4 * 1024 * 1024  # bytes of a request's head
_RELEASE = b'"max_tokens":2147483647'  # the router's own: it wants to be refused


class End(Enum):
    """What becomes of the connection."""

    KEEP = "keep"
    CLOSE = "close"
    RESET = "reset"


@dataclass(frozen=True)
class Act:
    """What an engine does with one request."""

    packets: tuple[tuple[float, bytes], ...]  # seconds before each, and its bytes
    end: End = End.KEEP
    unread: bool = False  # it ends as soon as the first byte of the request is there

    def __repr__(self) -> str:
        unread = "unread, " if self.unread else ""
        return (
            f"Act({unread}{b''.join(packet for _, packet in self.packets)!r} in {len(self.packets)}, {self.end.name})"
        )


@dataclass(frozen=True)
class Heard:
    """A request, as the engine got it."""

    engine: str
    line: bytes
    body: bytes


@dataclass
class Cast:
    """The engines of one router."""

    acts: dict[str, list[Act]]  # by role; they are taken from the front
    at: dict[str, list[str]] = field(default_factory=lambda: {"prefill": [], "decode": []})  # host:port by role
    heard: list[Heard] = field(default_factory=list)
    releases: list[Heard] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)
    open: set[asyncio.StreamWriter] = field(default_factory=set)

    def connections(self, role: str) -> int:
        """How many connections engines of a role have."""
        return len(self._open_at(role))

    def _open_at(self, role: str) -> list[asyncio.StreamWriter]:
        ports = {int(at.rpartition(":")[2]) for at in self.at[role]}
        return [writer for writer in self.open if writer.get_extra_info("sockname")[1] in ports]

    async def serve(self, name: str, role: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        self.open.add(writer)
        try:
            while await self._one(name, role, reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except Exception as exc:  # it would be lost in a task that nobody waits for
            self.faults.append(exc)
        finally:
            self.open.discard(writer)
            writer.close()

    async def _one(self, name: str, role: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first = await reader.readexactly(1)
        coming = self.acts[role]
        if coming and coming[0].unread:
            coming.pop(0)
            _reset(writer)
            return False
        head = first + await reader.readuntil(b"\r\n\r\n")
        line, *pairs = [tuple(one.split(b": ", 1)) for one in head[:-4].split(b"\r\n")]
        headers = {key.lower(): value for key, value in pairs}
        assert len(headers) == len(pairs), f"a header stands there twice: {head!r}"
        assert b"transfer-encoding" not in headers, head
        body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
        heard = Heard(name, line[0], body)
        if _RELEASE in body:
            self.releases.append(heard)
            writer.write(whole(b"{}", status=400))
            return True
        self.heard.append(heard)
        act = coming.pop(0) if coming else Act(((0.0, good(role, body)),))
        return await _play(act, writer)


async def _play(act: Act, writer: asyncio.StreamWriter) -> bool:
    last = len(act.packets) - 1
    for number, (pause_s, packet) in enumerate(act.packets):
        if pause_s:
            await asyncio.sleep(pause_s)
        if writer.transport.is_closing():
            return False
        if number == last and packet and act.end is End.CLOSE:
            await _write(packet[:-1], writer)
            await _end(packet[-1:], writer)
        else:
            await _write(packet, writer)
    if act.end is End.RESET:
        _reset(writer)
    return act.end is End.KEEP


async def _write(packet: bytes, writer: asyncio.StreamWriter) -> None:
    if packet:
        writer.write(packet)
        await writer.drain()


async def _end(last: bytes, writer: asyncio.StreamWriter) -> None:
    """Send the last byte and the end at once: with a moment in between the next request might already be here."""
    while writer.transport.get_write_buffer_size() and not writer.transport.is_closing():
        await asyncio.sleep(0.0002)
    if writer.transport.is_closing():
        return
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock, suppress(OSError):
        sock.send(last)
        sock.shutdown(socket.SHUT_WR)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def reciting(acts: Mapping[str, Sequence[Act]], up: Mapping[str, Sequence[bool]]) -> AsyncGenerator[Cast]:
    """Run engines; one that is not up has a port where nobody listens. What goes wrong in them is raised at the end."""
    cast = Cast({role: list(each) for role, each in acts.items()})
    async with AsyncExitStack() as stack:
        for role, each in up.items():
            for number, is_up in enumerate(each):
                sock = stack.enter_context(socket.socket())
                sock.bind(("127.0.0.1", 0))
                cast.at[role].append(f"127.0.0.1:{sock.getsockname()[1]}")
                if is_up:
                    await stack.enter_async_context(_listening(cast, f"{role}-{number}", role, sock))
        yield cast
    if cast.faults:
        raise cast.faults[0]


@asynccontextmanager
async def _listening(cast: Cast, name: str, role: str, sock: socket.socket) -> AsyncGenerator[None]:
    tasks: set[asyncio.Task[None]] = set()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(cast.serve(name, role, reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accepted, sock=sock, limit=_LIMIT)
    try:
        yield
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


# What they may say

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "e1",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def whole(body: bytes, *headers: bytes, status: int = 200, kind: bytes = b"application/json") -> bytes:
    """Return an answer with a length."""
    lines = b"".join(b"%b\r\n" % header for header in headers)
    kind = b"content-type: %b\r\n" % kind if kind else b""
    reason = b"OK" if status == 200 else b"Said"  # what an engine says in the usual case is read in another way
    head = b"HTTP/1.1 %d %b\r\n%b%bcontent-length: %d\r\n\r\n" % (status, reason, kind, lines, len(body))
    return head + body


def prefilled(**changes: object) -> bytes:
    """Return the body of a prefill engine's answer; a parameter that is None is left out."""
    params = {name: value for name, value in (PARAMS | changes).items() if value is not None}
    return json.dumps({"id": "cmpl-1", "usage": {"prompt_tokens": 4}, "kv_transfer_params": params}).encode()


def good(role: str, body: bytes) -> bytes:
    """Return an answer that is as it should be."""
    if role == "prefill":
        return whole(prefilled())
    if re.search(rb'"stream":\s*true', body):
        return whole(b'data: {"choices":[{"text":"one"}]}\n\ndata: [DONE]\n\n', kind=b"text/event-stream")
    return whole(b'{"id":"cmpl-2","choices":[{"text":"one"}],"usage":{"prompt_tokens":4}}')
