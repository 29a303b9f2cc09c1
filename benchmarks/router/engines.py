"""Null engines: prefill and decode engines that compute nothing, all in one process that costs next
to nothing.

``python -m benchmarks.router.engines '{"prefill": 2, "decode": 2}'`` prints the ports as JSON and
lives until its standard input ends. ``GET /bench/counts`` of any of them says what all of them have
seen.
"""

import asyncio
import contextlib
import json
import random
import sys
import time

import msgspec
import uvloop
from httptools import HttpParserError, HttpRequestParser

from benchmarks.router import words

_JSON = b"HTTP/1.1 %d %b\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n%b"
_SSE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: "
    b"chunked\r\n\r\n"
)
_ROUNDED = 0.0005  # s: half of what timers of the loop are rounded to; so they are never early


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """How the engines behave."""

    prefill: int = 2  # engines
    decode: int = 2
    push: bool = False  # the prefill engines say they write the KV cache themselves
    prefill_s: float = 0.0  # seconds a prompt takes, wherever it is computed
    # seconds between tokens, which come for all streams at once; whole milliseconds; 0: no waiting
    step_s: float = 0.0
    # each stream has a clock of its own, and its tokens come when no other stream's do
    alone: bool = False


class Counts(msgspec.Struct):
    """What the engines have seen."""

    prefill: int = 0  # good prefill legs
    decode: int = 0  # good decode legs, with the blocks of the same request
    alone: int = 0  # requests without a prefill leg
    # requests for so many tokens that a prefill engine is told to free its blocks
    released: int = 0
    wrong: int = 0  # bodies that are not what a client and a router should have made
    said: str = ""  # what was wrong with the first of them
    hung_up: int = 0  # answers that were not taken to their end
    open: int = 0  # answers that are not at their end
    late: int = 0  # steps that began more than a step late


class Engines:
    """What all engines of the process share."""

    def __init__(self, options, loop):
        self.options, self.loop = options, loop
        self.counts = Counts()
        self.streams = {}  # connection -> what it still gets
        self.pushed = {}  # push: number -> what waits for its KV cache; None: it is there
        self.due = 0.0  # of the next step
        self.timer = None

    def push(self, number):
        """The KV cache of a request has been written into the memory of a decode engine."""
        waiting = self.pushed.pop(number, None)
        if waiting is None:
            self.pushed[number] = None
        else:
            waiting()

    def receive(self, number, do):
        """Do something as soon as the KV cache of a request is there."""
        if number in self.pushed:
            del self.pushed[number]
            do()
        else:
            self.pushed[number] = do

    def join(self, connection, chunks):
        """Have a connection get one chunk of these a step; all streams of the process step at the
        same instant.
        """
        if self.options.alone:
            self.loop.call_later(
                self.options.step_s * random.random(), self._step_one, connection, iter(chunks)
            )
            self.streams[connection] = None
            return
        self.streams[connection] = iter(chunks)
        if self.timer is None:
            step = self.options.step_s
            self.due = (time.monotonic() // step + 1) * step
            self._arm()

    def _step_one(self, connection, chunks):
        """Give one connection its next chunk, if it is still there."""
        if connection not in self.streams:
            return
        chunk, is_last = next(chunks)
        connection.transport.write(chunk)
        if is_last:
            del self.streams[connection]
            connection.ended()
        else:
            self.loop.call_later(self.options.step_s, self._step_one, connection, chunks)

    def _arm(self):
        self.timer = self.loop.call_later(
            max(0.0, self.due - time.monotonic()) + _ROUNDED, self._step
        )

    def _step(self):
        if time.monotonic() < self.due:
            self._arm()
            return
        self.counts.late += time.monotonic() - self.due > self.options.step_s
        for connection, chunks in list(self.streams.items()):
            chunk, is_last = next(chunks)
            connection.transport.write(chunk)
            if is_last:
                del self.streams[connection]
                connection.ended()
        self.due += self.options.step_s
        self.timer = None
        if self.streams:
            self._arm()


class Connection(asyncio.Protocol):
    """One connection of a client or a router to an engine."""

    def __init__(self, engines, role, name):
        self.engines = engines
        self.role = role
        self.name = name
        self.parser = HttpRequestParser(self)
        self.is_busy = False
        self.waits = None
        self.expects = None  # number of the request whose KV cache is to be pushed

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        try:
            self.parser.feed_data(data)
        except HttpParserError as exc:
            self._wrong(f"not HTTP: {exc!r}")
            self.transport.close()

    def connection_lost(self, exc):
        self.engines.streams.pop(self, None)
        self.engines.pushed.pop(self.expects, None)
        if self.waits is not None:
            self.waits.cancel()
        if self.is_busy:
            self.engines.counts.hung_up += 1
            self.engines.counts.open -= 1

    def on_message_begin(self):
        self.url = b""
        self.body = []
        self.request_id = b""

    def on_url(self, url):
        self.url += url

    def on_header(self, name, value):
        if len(name) == 12 and name.lower() == b"x-request-id":
            self.request_id = value

    def on_headers_complete(self):
        pass

    def on_body(self, part):
        self.body.append(part)

    def on_message_complete(self):
        if self.url in _CHAT:
            self._generate(_CHAT[self.url])
        else:
            self._tell()

    def _generate(self, chat):
        body = self.body[0] if len(self.body) == 1 else b"".join(self.body)
        self.body = []
        try:
            asked = words.read(body)
        except words.Corrupt as exc:
            if self.role == "decode" and words.is_release(body):
                self.engines.counts.released += 1
                self._refuse("max_tokens is larger than the model's length")
            else:
                self._wrong(str(exc))
            return
        self.is_busy = True
        self.engines.counts.open += 1
        kv = asked.fields.kv_transfer_params
        name = (b"chatcmpl-%b" if chat else b"cmpl-%b-0") % self.request_id
        if self.role == "prefill":
            self._prefill(asked, kv, chat, name)
        elif kv is None:
            self.engines.counts.alone += 1
            self._after_prefill(self._answer, asked, chat)
        elif words.is_told(kv, asked.number, name=name.decode()):
            self.engines.counts.decode += 1
            self._receive(asked, chat)
        else:
            self.ended()
            self._wrong("a decode leg whose kv_transfer_params are not those of its request")

    def _receive(self, asked, chat):
        """Answer; if the prefill engines push, when they have done so."""
        if not self.engines.options.push:
            self._answer(asked, chat)
            return
        self.expects = asked.number
        self.engines.receive(asked.number, lambda: self._answer(asked, chat))

    def _prefill(self, asked, kv, chat, name):
        fields = asked.fields
        if kv is None or not kv.do_remote_decode or fields.max_tokens != 1 or fields.stream:
            self.ended()
            self._wrong("a prefill leg that asks for more than the KV cache of its prompt")
            return
        self.engines.counts.prefill += 1
        kv = words.kv_params(
            asked.number, asked.size, name, self.name, push=self.engines.options.push
        )
        ids = bool(fields.return_token_ids)
        body = words.whole(asked.number, 1, chat=chat, size=asked.size, kv=kv, ids=ids)
        self._after_prefill(self._prefilled, asked.number, body)

    def _prefilled(self, number, body):
        self._whole(body)
        if self.engines.options.push:
            self.engines.push(number)

    def _after_prefill(self, do, *args):
        wait = self.engines.options.prefill_s
        if wait:
            self.waits = self.engines.loop.call_later(wait, do, *args)
        else:
            do(*args)

    def _answer(self, asked, chat):
        tokens = asked.fields.max_tokens or 16
        options = asked.fields.stream_options
        if not asked.fields.stream:
            self._whole(words.whole(asked.number, tokens, chat=chat, size=asked.size))
            return
        usage = options is not None and bool(options.include_usage)
        stream = words.stream(asked.number, tokens, chat=chat, usage=usage, size=asked.size)
        end = _chunk(stream.end) + b"0\r\n\r\n"
        begin = _SSE + (_chunk(stream.first) if stream.first else b"")
        if not self.engines.options.step_s or tokens == 1:
            self.transport.write(b"".join((begin, *map(_chunk, stream.tokens), end)))
            self.ended()
            return
        self.transport.write(begin + _chunk(stream.tokens[0]))
        self.engines.join(self, _steps(stream.tokens, end))

    def _whole(self, body):
        self.transport.write(_JSON % (200, b"OK", len(body), body))
        self.ended()

    def ended(self):
        """The answer has been written."""
        self.is_busy = False
        self.waits = self.expects = None
        self.engines.counts.open -= 1

    def _wrong(self, why):
        self.engines.counts.wrong += 1
        self.engines.counts.said = self.engines.counts.said or f"{self.role}: {why}"
        self._refuse(why)

    def _refuse(self, why):
        body = msgspec.json.encode(
            {"error": {"message": why, "type": "BadRequestError", "param": None, "code": 400}}
        )
        self.transport.write(_JSON % (400, b"Bad Request", len(body), body))

    def _tell(self):
        body = _TOLD.get(self.url)
        if self.url == b"/bench/counts":
            body = msgspec.json.encode(self.engines.counts)
        status = (404, b"Not Found") if body is None else (200, b"OK")
        body = body or b""
        self.transport.write(_JSON % (*status, len(body), body))


def _chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def _steps(tokens, end):
    """Yield the chunks after the first token, and whether each is the last."""
    for token in tokens[1:-1]:
        yield _chunk(token), False
    yield _chunk(tokens[-1]) + end, True


_CHAT = {b"/v1/completions": False, b"/v1/chat/completions": True}
_CARD = {
    "id": words.MODEL,
    "object": "model",
    "created": 0,
    "owned_by": "vllm",
    "max_model_len": 1 << 20,
}
_METRICS = "".join(
    f'# TYPE vllm:{name} gauge\nvllm:{name}{{model_name="{words.MODEL}",engine="0"}} 0\n'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
)
_TOLD = {
    b"/health": b"",
    b"/version": b'{"version":"0.32.0"}',
    b"/v1/models": msgspec.json.encode({"object": "list", "data": [_CARD]}),
    b"/metrics": _METRICS.encode(),
}


@contextlib.asynccontextmanager
async def serving(options):
    """Serve on free ports of the loopback; yield the engines and {role: [ports]}."""
    loop = asyncio.get_running_loop()
    engines = Engines(options, loop)
    servers = []
    ports = {"prefill": [], "decode": []}
    for role, count in (("prefill", options.prefill), ("decode", options.decode)):
        for place in range(count):
            name = f"engine-{role}-{place}".encode()
            make = lambda role=role, name=name: Connection(engines, role, name)  # noqa: E731
            server = await loop.create_server(make, "127.0.0.1", 0, backlog=4096)
            servers.append(server)
            ports[role].append(server.sockets[0].getsockname()[1])
    try:
        yield engines, ports
    finally:
        for server in servers:
            server.close()


async def main():
    options = msgspec.json.decode(sys.argv[1], type=Options)
    async with serving(options) as (_, ports):
        print(json.dumps(ports), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
