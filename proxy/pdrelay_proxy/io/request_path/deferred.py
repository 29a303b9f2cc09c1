"""What need not be done while a request is under way: kept for a moment, and done in one go.

Counting and logging touch much memory that nothing else of a request needs. Done for many requests
at a time they cost a fraction, and no first token waits for them. Whoever reads what is counted
settles first, so nobody sees the delay.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

_PAUSE_S: Final = 0.02  # seconds that something may have to wait
_MOST: Final = 1024  # things that wait
logger = logging.getLogger(__name__)


class DeferredCalls:
    """Calls that wait to be made, in the order they came; ``around`` is entered for each batch."""

    def __init__(self, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._around = around
        self._after = list[Callable[[], None]]()
        self.is_settling = False
        self._calls: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self._timer: asyncio.TimerHandle | None = None

    def end_batches_with(self, do: Callable[[], None]) -> None:
        """Have this called at the end of each batch, by what has calls made here itself: neither
        can be built last.
        """
        self._after.append(do)

    def add(self, do: Callable[..., object], *args: object) -> None:
        """Have this called soon."""
        calls = self._calls
        calls.append((do, args))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self.settle)
        elif len(calls) >= _MOST:
            self.settle()

    def settle(self) -> None:
        """Make the calls that wait; one that fails is a bug, is logged as such, and holds up none
        of the others.
        """
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        calls = self._calls
        self._calls = []
        calls += [(end, ()) for end in self._after]
        was_settling = self.is_settling
        self.is_settling = True
        with self._around():
            for do, args in calls:
                try:
                    do(*args)
                except Exception:
                    logger.exception("%s failed", do)
        self.is_settling = was_settling
