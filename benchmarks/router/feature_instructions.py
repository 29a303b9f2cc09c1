"""What a request costs the router in memory, in instructions: no socket, no clock, engines that
answer at once.

    python -m benchmarks.router.feature_instructions  # every case
    python -m benchmarks.router.feature_instructions "all, ids" "defaults, ids"

Needs valgrind, its header files and a C compiler; half a minute for each case. Imports and the
first requests are not counted.
"""

import asyncio
import gc
import logging
import os
import socket
import sys
from functools import partial

import httpx
from uvicorn.server import ServerState

import pdrelay_proxy
from benchmarks.router.valgrind import Switch, counted
from pdrelay_proxy import listeners
from pdrelay_proxy.app import Fabric, build
from pdrelay_proxy.features.first_token.settings import FirstTokenFrom
from pdrelay_proxy.features.kv_events.settings import KvEvents
from pdrelay_proxy.known_settings import with_values
from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.simulated.prefix_cache import PrefixCache

WARM, MEASURED = 50, 150  # requests
EVERY_S = 0.001  # seconds from one request to the next
SHARED = list(range(1000, 1064))  # tokens that all prompts begin with
OWN = list(range(2000, 2056))  # tokens at their ends
CACHED_BLOCKS = 2000  # of each engine, in the index
PREFILL, DECODE = ("p0", "p1"), ("d0", "d1")

ALL = {
    "prefill_policy": PolicyName.PREFIX,
    "decode_policy": PolicyName.PREFIX,
    "kv_events": KvEvents.AUTO,
    "first_token_from": FirstTokenFrom.PREFILL,
    "min_split_new_bytes": 64,
}
PREFIX = {name: ALL[name] for name in ("prefill_policy", "decode_policy")}
# Name of a case: the settings, and whether prompts are chats.
CASES = {
    "defaults, ids": ({}, False),
    "prefix, ids": (PREFIX, False),
    "prefix and events, ids": (PREFIX | {"kv_events": KvEvents.AUTO}, False),
    "first token, ids": ({"first_token_from": FirstTokenFrom.PREFILL}, False),
    "all, ids": (ALL, False),
    "defaults, chats": ({}, True),
    "prefix, chats": (PREFIX, True),
    "all, chats": (ALL, True),
}


def prompts(count, *, chats):
    """Yield requests of about 512 bytes whose prompts begin alike and end in a number of their
    own.
    """
    tail = b'"max_tokens":3,"stream":true,"temperature":0}'
    if chats:
        text = b"once upon a time there was a river, " * 10
        body = b'{"model":"m","messages":[{"role":"user","content":"%b' % text
        ends = (b'%d"}],' % number + tail for number in range(count))
    else:
        body = b'{"model":"m","prompt":[' + b",".join(b"%d" % token for token in SHARED + OWN)
        ends = (b",%d]," % number + tail for number in range(3000, 3000 + count))
    path = b"/v1/chat/completions" if chats else b"/v1/completions"
    head = (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        b"%d\r\n\r\n"
    )
    for end in ends:
        yield head % (path, len(body) + len(end)) + body + end


def whole(body):
    return (
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n"
        % len(body)
        + body
    )


def chunk(body):
    return b"%x\r\n%b\r\n" % (len(body), body)


HEAD = b'"id":"cmpl-x","object":"chunk","created":1,"model":"m"'
PARAMS = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4,5,6,7,8]],'
    b'"remote_engine_id":"e1","remote_request_id":"cmpl-x-0","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1,'
    b'"dcp_size":1,"pp_size":1,"remote_num_tokens":120,"transfer_mode":"pull","remote_prefill_cached_tokens":64,'
    b'"pdrelay_first_token":{"apis":["completions","chat"],"max_model_len":4096}}'
)
IDS = b'"prompt_token_ids":[%b]' % b",".join(b"%d" % token for token in SHARED + OWN)


def answers(*, chats):
    """Return what a prefill engine answers, and the reads in which a decode engine's answer
    comes.
    """
    usage = b'"usage":{"prompt_tokens":120,"completion_tokens":1,"total_tokens":121,"prompt_tokens_details":null}'
    ends = b'"index":0,"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":[5]'
    if chats:
        choice = (
            b'{"message":{"role":"assistant","content":" a","refusal":null,"tool_calls":[]},%b}'
            % ends
        )
        prefill = b'{%b,"choices":[%b],%b,%b,"kv_transfer_params":%b}' % (
            HEAD,
            choice,
            IDS,
            usage,
            PARAMS,
        )
        role = (
            b'data: {%b,"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
            % HEAD
        )
        texts = [b'"delta":{"content":" b"}', b'"delta":{"content":" c"}']
    else:
        choice = b'{"text":" a",%b,%b}' % (ends, IDS)
        prefill = b'{%b,"choices":[%b],%b,"kv_transfer_params":%b}' % (HEAD, choice, usage, PARAMS)
        role = b""
        texts = [b'"text":" b"', b'"text":" c"']
    events = [
        b'data: {%b,"choices":[{"index":0,%b,"logprobs":null,"finish_reason":%b}]}\n\n'
        % (HEAD, text, finish)
        for text, finish in zip(texts, (b"null", b'"length"'), strict=True)
    ]
    stream = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: "
        b"chunked\r\n\r\n"
    )
    reads = [
        stream + chunk(role + events[0]),
        chunk(events[1]) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
    ]
    return whole(prefill), reads


class Memory(asyncio.Transport):
    """A connection without a socket, but for what a router asks of it; ``written`` gets each
    write.
    """

    def __init__(self, written):
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self._written = written
        self._sockets = socket.socketpair()  # a router looks whether something waits in it
        self._extra["socket"] = self._sockets[0]
        self._is_closing = False

    def write(self, data):
        self._written(data)

    def writelines(self, pieces):
        self._written(b"".join(pieces))

    def is_closing(self):
        return self._is_closing

    def close(self):
        self._is_closing = True

    abort = close

    def pause_reading(self):
        pass

    resume_reading = pause_reading

    def get_write_buffer_size(self):
        return 0

    def set_write_buffer_limits(self, high=None, low=None):
        pass


class Events(httpx.AsyncByteStream):
    """The state of a cache, and then silence."""

    def __init__(self):
        self._cache = PrefixCache(CACHED_BLOCKS)
        for number in range(CACHED_BLOCKS // 7):
            self._cache.use([*SHARED, *range(10_000 * number, 10_000 * number + 56)])

    async def __aiter__(self):
        frames = self._cache.frames()
        yield await anext(frames)
        yield await anext(frames)
        await asyncio.Event().wait()


class Probes(httpx.AsyncBaseTransport):
    """Answers health checks."""

    async def handle_async_request(self, request):
        match request.url.path:
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 4096}]})
            case "/version":
                return httpx.Response(200, json={"version": "0.32.0"})
            case "/v1/pdrelay/kv_events":
                return httpx.Response(200, stream=Events())
        return httpx.Response(200)


class VirtualTime(asyncio.SelectorEventLoop):
    """Time passes as it is told: how much work waits until later, and is done together, depends on
    it.
    """

    now = 0.0

    def time(self):
        return self.now


async def play(case, switch):
    """Serve requests, one after the other."""
    settings, chats = CASES[case]
    given = {
        "prefill": tuple(f"{name}:80" for name in PREFILL),
        "decode": tuple(f"{name}:80" for name in DECODE),
    }
    given |= {"health_check_interval_s": 3600.0, "allowed_hosts": ("*",), "load_reports": False}
    prefill, decode = answers(chats=chats)
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    async def dial(protocol, host, port):
        connection = protocol()
        reads = [prefill] if host in PREFILL else decode

        def written(_):
            for read in reads:  # each in a turn of its own
                loop.call_soon(connection.data_received, read)

        connection.connection_made(Memory(written))

    chosen = with_values(Settings(**given), settings)
    router = build(chosen, fabric=Fabric(Probes(), dial, loop.time))
    config = listeners.main_config(router, chosen)
    state = ServerState()
    config.load()
    state.default_headers = [(b"date", b"today")]
    answered = []

    def to_client(data):
        answered.append(data)
        if data.endswith(b"0\r\n\r\n"):
            done.set()

    async with router.app.router.lifespan_context(router.app):
        protocol = partial(
            config.http_protocol_class, config=config, server_state=state, app_state={}
        )
        client = protocol()
        client.connection_made(Memory(to_client))
        for _ in range(1000):  # engines are known by then, and what they have
            loop.now += EVERY_S
            await asyncio.sleep(0)
        gc.collect()
        # as the router's process does; a collection of all modules in between would be half of a
        # request
        gc.freeze()
        gc.set_threshold(5000)
        for number, request in enumerate(prompts(WARM + MEASURED, chats=chats)):
            if number == WARM:
                switch.on()
            loop.now += EVERY_S
            answered.clear()
            client.data_received(request)
            await done.wait()
            done.clear()
        switch.off()
        text = b"".join(answered)
        assert text.startswith(b"HTTP/1.1 200"), text
        assert b'" c"' in text, text
        assert (b'" a"' in text) == ("first_token_from" in settings), text
        os._exit(0)  # an end in good order would wait, and time does not pass any more


def main(argv):
    if argv[:1] == ["--play"]:
        logging.basicConfig(filename="/dev/null", level=logging.INFO)
        with asyncio.Runner(loop_factory=VirtualTime) as runner:
            runner.run(play(argv[1], Switch()))
    print(f"{pdrelay_proxy.__path__[0]}: instructions of a request", flush=True)
    for case in argv or CASES:
        total = counted("-m", "benchmarks.router.feature_instructions", "--play", case)
        print(f"{case:24} {total / MEASURED:12,.0f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
