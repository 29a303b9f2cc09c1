"""What the tests of the router's own HTTP client share: event loops, legs, answers."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from support.raw_engine import RawEngine
from xpyd_proxy.core.address import Address
from xpyd_proxy.core.model import Instance, InstanceId, Leg, Role

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


async def until(seen: Callable[[], object], *, within_s: float = 5.0) -> None:
    """Wait for something to be seen."""
    start = time.monotonic()
    while not seen():
        assert time.monotonic() - start < within_s
        await asyncio.sleep(0.005)


def leg_to(engine: RawEngine, body: bytes = b"{}", *, scheme: str = "http") -> Leg:
    instance = Instance(InstanceId("decode-0"), Role.DECODE, Address.parse(f"{scheme}://{engine.at}"))
    return Leg(instance, "/v1/completions", body, ())


def answer(body: bytes = b"hello", *, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
