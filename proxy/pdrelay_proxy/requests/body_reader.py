"""Large bodies are read beside the event loop, a few at a time, so that other requests do not wait
for them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self, TypeVar

T = TypeVar("T")
# Bytes of a body that is read in a thread. Up to here the worst bodies take some 10 ms and the
# usual ones below 0.2 ms; the way into a thread and back takes 0.1 ms.
LARGE: Final = 256 * 1024
_THREADS: Final = 2  # they share the interpreter's lock: more would not read more


class BodyReader:
    """Reads bodies; use it as a context manager.

    The one of a router is shared by all its routes.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pdrelay-body")

    def submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Have a thread do it; whoever asked may leave."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(_looked_at)
        return future

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Begin nothing any more; what is being read comes to its end by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _looked_at(future: "asyncio.Future[T]") -> None:
    if not future.cancelled():
        future.exception()  # or asyncio would complain that nobody has looked
