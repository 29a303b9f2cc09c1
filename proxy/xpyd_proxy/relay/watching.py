"""Tells the watchers how a leg goes: that it begins, that it is answered, and once how it has ended."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from xpyd_proxy.core.model import Instance, RequestId
from xpyd_proxy.core.ports import Watcher
from xpyd_proxy.core.retries import Failure, LegFailed, failure_of
from xpyd_proxy.errors import EngineError


@dataclass(slots=True)
class Watched:
    """One leg under way."""

    watchers: Sequence[Watcher]
    instance: Instance
    request: RequestId
    clock: Callable[[], float]  # seconds; only differences count
    start: float
    failure: Failure | None = None  # how it has failed, as far as is known

    def answered(self) -> None:
        """Its answer is there, and good: all of it (prefill), or its first event (decode)."""
        seconds = self.clock() - self.start
        for watcher in self.watchers:
            watcher.answered(self.instance, self.request, seconds)

    def failed(self, error: EngineError) -> None:
        """Its stream has broken off; whoever reads it handles the exception, and the watchers must hear of it too."""
        self.failure = failure_of(error)


@contextmanager
def watching(
    watchers: Sequence[Watcher], instance: Instance, request: RequestId, clock: Callable[[], float]
) -> Generator[Watched]:
    """Enter just before a leg is sent; leave when it is closed. A leg that was dropped has not failed."""
    watched = Watched(watchers, instance, request, clock, clock())
    for watcher in watchers:
        watcher.began(instance, request)
    try:
        yield watched
    except LegFailed as failed:
        watched.failure = failed.failure
        raise
    finally:
        for watcher in watchers:
            watcher.ended(instance, request, watched.failure)
