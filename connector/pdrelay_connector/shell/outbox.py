"""Results and numbers from one of our threads for the engine thread, under one lock."""

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from pdrelay_connector.core.counters import StatsReport, merge

T = TypeVar("T")


class Outbox(Generic[T]):
    """A queue from one thread to the engine thread; a put with results calls ``on_news``."""

    def __init__(self, on_news: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._on_news = on_news
        self._items: list[T] = []
        self._reports: list[StatsReport] = []

    def put(self, items: Iterable[T], report: StatsReport) -> None:
        """Add results and numbers; results wake the engine thread."""
        new = list(items)
        with self._lock:
            self._items += new
            if report:
                self._reports.append(report)
                self._reports = [merge(self._reports)] if len(self._reports) > 64 else self._reports
        if new:
            self._news.set()
            self._on_news()

    def take_items(self) -> list[T]:
        """Return the results since the last call."""
        with self._lock:
            items = self._items
            self._items = []
            self._news.clear()
        return items

    def take_report(self) -> StatsReport:
        """Return the numbers since the last call."""
        with self._lock:
            reports = self._reports
            self._reports = []
        return merge(reports)

    @property
    def has_report(self) -> bool:
        """Whether :meth:`take_report` would return any numbers."""
        return bool(self._reports)

    def wait(self, seconds: float) -> None:
        """Wait for results, at most so long."""
        self._news.wait(seconds)

    def __bool__(self) -> bool:
        return bool(self._items)
