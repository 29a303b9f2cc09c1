"""What the tests of the router's own HTTP client share: event loops, legs, answers, and who is told of them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import Instance, InstanceId, LegRequest, Role
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.io.wire import WireEngines, response_handler
from pdrelay_proxy.io.wire.response_handler import ResponseHandler
from support.raw_engine import RawEngine

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def run(loop: str, main: Coroutine[Any, Any, Any]) -> Any:
    """Run the coroutine to its end on that event loop; no task may be left over."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        result = runner.run(main)
        assert runner.run(_tasks()) == 1
        return result


async def _tasks() -> int:
    return len(asyncio.all_tasks())


async def until(seen: Callable[[], object], *, within_s: float = 20.0) -> None:
    """Wait for something to be seen."""
    start = time.monotonic()
    while not seen():
        assert time.monotonic() - start < within_s
        await asyncio.sleep(0.005)


def leg_to(engine: RawEngine, body: bytes = b"{}", *, scheme: str = "http") -> LegRequest:
    instance = Instance(InstanceId("decode-0"), Role.DECODE, Address.parse(f"{scheme}://{engine.at}"))
    return LegRequest(instance, "/v1/completions", body, ())


def answer(body: bytes = b"hello", *, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


IS_COMPILED = not str(response_handler.__file__).endswith(".py")
telling = pytest.mark.skipif(IS_COMPILED, reason="Told cannot be derived from a class that is compiled")
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Told(ResponseHandler):
    """Keeps what it is told of an answer, for somebody who waits. ``took`` is called with each piece of the body."""

    def __init__(self, engine: str = "decode-0", took: Callable[[bytes], object] = len) -> None:
        super().__init__(engine)
        self.status = 0
        self.content_type = b""
        self.load = b""
        self.pieces: list[bytes] = []
        self.is_over = False
        self._took = took
        self._news = asyncio.Event()

    @property
    def body(self) -> bytes:
        """What has come so far."""
        return b"".join(self.pieces)

    async def begun(self) -> None:
        """Wait for the head; raises why there will be none."""
        await self._until(lambda: self.status)

    async def some(self) -> None:
        """Wait for some of the body; raises why there will be none."""
        await self._until(lambda: self.pieces)

    async def whole(self) -> bytes:
        """Wait for the end, and return the body; raises what it failed of."""
        await self._until(lambda: self.complete)
        return self.body

    async def _until(self, seen: Callable[[], object]) -> None:
        while not seen():
            if self.is_over and self.error is not None:
                raise self.error
            self._news.clear()
            await self._news.wait()

    def began(self, status: int, content_type: bytes, load: bytes) -> None:
        self.status = status
        self.content_type = content_type
        self.load = load
        self._news.set()

    def arrived(self, piece: bytes, *, last: bool = False) -> None:
        self.pieces.append(piece)
        self._news.set()
        self._took(piece)

    def end(self) -> None:
        self._over()

    def fail(self, error: EngineError) -> None:
        self._over()

    def crashed(self, bug: Exception) -> None:
        self.error = bug
        self._over()

    def _over(self) -> None:
        assert not self.is_over, "the end was told twice"
        self.is_over = True
        self._news.set()


@asynccontextmanager
async def told(engines: WireEngines, leg: LegRequest, took: Callable[[bytes], object] = len) -> AsyncGenerator[Told]:
    """Post a leg, and have its answer told; leaving the block drops what has not come."""
    one = Told(leg.instance.id, took)
    engines.leg_sender.post(one, leg)
    try:
        yield one
    finally:
        if one.complete:
            engines.leg_sender.done(one)
        else:
            one.drop()
