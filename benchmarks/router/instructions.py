"""How many instructions a request takes in the router, in memory: other load on the machine changes
nothing.

``python -m benchmarks.router.instructions short nonstream`` counts 200 requests of each scenario
after a warm-up, under valgrind; ``--compiled`` those of the compiled router. There is no socket:
clients and engines are lists of bytes, which are prepared before anything is counted, and both
legs' connections stay open. The log is on, and goes nowhere.

``--calls`` counts the Python calls of one request instead (no valgrind needed).
"""

import argparse
import asyncio
import collections
import contextlib
import gc
import os
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.router import words
from benchmarks.router.valgrind import Switch, counted

_WARM, _COUNTED, _BATCH = 200, 200, 50  # requests; of a batch the deferred work is done together
_PREFILL = ("http://192.0.2.1:1", "http://192.0.2.2:1")  # names would have to be resolved
_DECODE = ("http://192.0.2.3:1", "http://192.0.2.4:1")
_TURNS = 100  # of the event loop, in which a connection is open
_ID = re.compile(rb"x-request-id: ([!-~]+)")
# of the router's id in an engine's answer
_PLACE = b"#" * len("pdrelay-f0a85788dfc24912f1860abd708ead6f")
_JSON = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n%b"
_SSE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: "
    b"chunked\r\n\r\n"
)
_KINDS = {
    "short": {},
    "nonstream": {"stream": False},
    "chat": {"chat": True},
    "prompt32k": {"size": 32 << 10},
    "push": {"push": True},
    "chat32k": {"chat": True, "size": 32 << 10},
}


class Wire:
    """A transport that keeps what is written; what it calls is C, so that it counts for next to
    nothing.
    """

    def __init__(self, sock=None):
        self.written = []
        self.write = self.written.append
        self.is_closing = bool
        self.get_write_buffer_size = int
        self.extra = {"socket": sock, "peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}
        self.get_extra_info = self.extra.get
        self.pause_reading = self.resume_reading = self.close = self.abort = lambda: None
        self.set_write_buffer_limits = lambda **_: None
        self.can_write_eof = bool

    def writelines(self, pieces):
        self.write(b"".join(pieces))


class Rig:
    """A router between clients and engines that are not there."""

    def __init__(self, *, stream=True, chat=False, size=512, push=False):
        from pdrelay_proxy import listeners
        from pdrelay_proxy.app import Fabric, build
        from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
        from pdrelay_proxy.settings import Settings

        self.stream = stream
        self.chat = chat
        self.size = size
        self.push = push
        self.tells_ids = not push
        self.engines = {"p": [], "d": []}  # connections, and what was written to them
        self.socks = []
        settings = replace(Settings(), prefill=_PREFILL, decode=_DECODE)
        self.router = build(settings, fabric=Fabric(None, self.dial))
        registry = self.router.requests.services.fleet.registry
        for member in registry.members():
            registry.learn(member.instance.id, EngineCapabilities(version="0.32.0"))
        self.protocol = listeners.main_protocol(self.router, settings)
        self.state = None
        self.client = None

    async def dial(self, protocol, host, _port):
        ours, theirs = socket.socketpair()
        self.socks += [ours, theirs]
        connection = protocol()
        wire = Wire(ours)
        self.engines["p" if f"http://{host}:1" in _PREFILL else "d"].append(
            (connection, wire.written)
        )
        connection.connection_made(wire)

    def connect(self):
        import uvicorn
        from uvicorn.server import ServerState

        config = uvicorn.Config(self.router.app, log_config=None, ws="none")
        config.load()
        self.state = self.state or ServerState()
        self.state.default_headers = [(b"date", b"Tue, 24 Nov 2026 22:00:00 GMT")]
        protocol = self.protocol(config=config, server_state=self.state, app_state={})
        wire = Wire()
        protocol.connection_made(wire)
        return protocol, wire

    def bytes_of(self, number):
        """Return the bytes of one request: the client's, the prefill engine's answer, the decode
        engine's.
        """
        chat, size = self.chat, self.size
        asked = b"".join(
            words.request(
                number, host=b"127.0.0.1:8000", size=size, tokens=2, chat=chat, stream=self.stream
            )
        )
        kv = words.kv_params(number, size, b"cmpl-%b-0" % _PLACE, b"engine", push=self.push)
        prefilled = words.whole(number, 1, chat=chat, size=size, kv=kv, ids=self.tells_ids)
        if not self.stream:
            decoded = words.whole(number, 2, chat=chat, size=size)
            return asked, _JSON % (len(prefilled), prefilled), _JSON % (len(decoded), decoded)
        stream = words.stream(number, 2, chat=chat, usage=True, size=size)
        chunks = [stream.first, *stream.tokens, stream.end]
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks if chunk)
        return asked, _JSON % (len(prefilled), prefilled), _SSE + body + b"0\r\n\r\n"

    async def serve(self, each):
        """Serve one request, which is to be answered at once unless connections have to be
        opened.
        """
        asked, prefilled, decoded = each
        protocol, wire = self.client
        protocol.data_received(asked)
        for answer, role in ((prefilled, "p"), (decoded, "d")):
            for connection, written in self.engines[role]:  # noqa: B007 (it is used below)
                if written:
                    break
            else:
                connection, written = await self._connected(role)
            if self.push and role == "p":  # it names the request, and the router looks at that
                own = _ID.search(written[0])[1]
                answer = answer.replace(_PLACE, own.ljust(len(_PLACE), b"0"))
            written.clear()
            connection.data_received(answer)
        if not wire.written:
            raise RuntimeError("there is no answer")
        if not wire.written[0].startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(wire.written[0])
        wire.written.clear()

    async def _connected(self, role):
        """Wait for the first leg of an engine."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
            for connection, written in self.engines[role]:
                if written:
                    return connection, written
        raise RuntimeError(f"no leg has come to {role}: {self.client[1].written}")

    async def serve_all(self, every):
        for place, each in enumerate(every, 1):
            await self.serve(each)
            if not place % _BATCH:
                self.router.telemetry.later.settle()


async def _count(name, switch, *, calls):
    rig = Rig(**_KINDS[name])
    await rig.router.requests.__aenter__()
    rig.client = rig.connect()
    every = [rig.bytes_of(number) for number in range(1, _WARM + _COUNTED + 1)]
    await rig.serve_all(every[:_WARM])
    if calls:
        return _calls(rig, every[_WARM:])
    # else the start decides whether one more collection falls among the requests: 9,000 for each
    gc.collect()
    switch.on()
    await rig.serve_all(every[_WARM:])
    switch.off()
    return None


def _calls(rig, every):
    found = collections.Counter()

    def note(frame, event, _):
        if event == "call":
            code = frame.f_code
            found[
                f"{Path(code.co_filename).parent.name}/{Path(code.co_filename).name}:{code.co_qualname}"
            ] += 1

    async def all_of_them():
        sys.setprofile(note)
        try:
            await rig.serve_all(every)
        finally:
            sys.setprofile(None)

    coro = all_of_them()
    with contextlib.suppress(StopIteration):
        coro.send(None)
    return found


def _play(name, *, calls):
    """Serve the requests of a scenario; return the calls, if asked."""
    import uvloop

    from pdrelay_proxy.io import logs
    from pdrelay_proxy.settings import LogFormat

    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        logs.configure("info", LogFormat.TEXT)
        gc.freeze()
        gc.set_threshold(5_000, 10, 10)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_count(name, Switch(), calls=calls))


def _print_calls(name):
    from pdrelay_proxy.requests import request

    found = _play(name, calls=True)
    print(f"{name}: {found.total() / _COUNTED:.1f} calls a request ({request.__file__})")
    for what, times in found.most_common():
        if times >= _COUNTED // 4:
            print(f"  {times / _COUNTED:6.2f} {what}")


def _kind(name):
    if name not in _KINDS:
        raise argparse.ArgumentTypeError(f"{name} is not a scenario: write {', '.join(_KINDS)}")
    return name


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    # Python 3.11 would look for the empty list among the choices
    parser.add_argument("names", nargs="*", type=_kind, help=", ".join(_KINDS))
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--keep", help="keep callgrind's profiles under this name")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inner:
        _play(given.inner, calls=False)
        os._exit(0)  # nothing is closed: nobody is there
    env = {}
    if given.compiled:
        from support.compiled import compiled

        env["PYTHONPATH"] = os.pathsep.join([str(compiled()), os.environ.get("PYTHONPATH", "")])
    for name in given.names or ("short", "nonstream"):
        if given.calls:
            _print_calls(name)
            continue
        profile = f"{given.keep}.{name}" if given.keep else "/dev/null"
        module = ("-m", "benchmarks.router.instructions", "--inner", name)
        total = counted(*module, profile=profile, **env)
        print(f"{name}: {total / _COUNTED:,.0f} instructions a request", flush=True)


if __name__ == "__main__":
    main()
