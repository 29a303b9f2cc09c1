"""Tells the watchers how a leg goes: that it begins, that it is answered, and once how it has ended."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from xpyd_proxy.core.model import Instance, RequestId
from xpyd_proxy.core.ports import Watcher
from xpyd_proxy.core.retries import Failure, LegFailed, failure_of
from xpyd_proxy.errors import EngineError


class Watched:
    """One leg: enter just before it is sent, leave when it is closed. A leg that was dropped has not failed."""

    __slots__ = ("clock", "failure", "instance", "request", "start", "watchers")

    def __init__(
        self, watchers: Sequence[Watcher], instance: Instance, request: RequestId, clock: Callable[[], float]
    ) -> None:
        self.watchers = watchers
        self.instance = instance
        self.request = request
        self.clock = clock  # seconds; only differences count
        self.start = clock()
        self.failure: Failure | None = None  # how it has failed, as far as is known

    def __enter__(self) -> Self:
        self.start = self.clock()
        for watcher in self.watchers:
            watcher.began(self.instance, self.request)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, LegFailed):
            self.failure = error.failure
        for watcher in self.watchers:
            watcher.ended(self.instance, self.request, self.failure)

    def answered(self) -> None:
        """Its answer is there, and good: all of it (prefill), or its first event (decode)."""
        seconds = self.clock() - self.start
        for watcher in self.watchers:
            watcher.answered(self.instance, self.request, seconds)

    def failed(self, error: EngineError) -> None:
        """Its stream has broken off; whoever reads it handles the exception, and the watchers must hear of it too."""
        self.failure = failure_of(error)
