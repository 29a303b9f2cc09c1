"""Orders the batches of one publisher; missing ones are requested once, and then given up.

vLLM numbers its batches from 0 and keeps the last ones for replay (``ZmqEventPublisher``).
Subscribed batches may begin late or leave some out, and a replay may overlap them and leave some
out, too.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Literal, TypeAlias

MAX_WAITING_BYTES = 64 << 20  # of batches behind a gap


class Gap(Enum):
    """Batches are lost."""

    GAP = 0


GAP: Literal[Gap.GAP] = Gap.GAP
Step: TypeAlias = bytes | Gap


class BatchSequence:
    """Puts the batches of one publisher in order.

    The caller replays when :meth:`missing` tells from where.
    """

    def __init__(self, max_waiting: int = MAX_WAITING_BYTES) -> None:
        self._max_waiting = max_waiting  # bytes
        self.expected = 0  # number of the next batch
        self.gaps = 0
        self._last_live: int | None = None
        self._replay_from: int | None = None  # from where the replay under way is
        self._waiting: dict[int, bytes] = {}
        self._waiting_bytes = 0
        self._steps: list[Step] = []

    def live(self, number: int, payload: bytes) -> None:
        """Add a published batch; numbers that begin anew mean a new publisher."""
        if self._last_live is not None and number <= self._last_live:
            self._begin_anew()
        self._last_live = number
        self.replayed(number, payload)

    def replayed(self, number: int, payload: bytes) -> None:
        """Take a batch of a replay."""
        if number < self.expected or number in self._waiting:
            return
        self._waiting[number] = payload
        self._waiting_bytes += len(payload)
        self._advance()
        if self._waiting_bytes > self._max_waiting:
            self._give_up()

    def missing(self) -> int | None:
        """Begin a replay for missing batches; return its first number."""
        return self.begin_replay() if self._waiting else None

    def begin_replay(self) -> int:
        """Begin a replay, and return its first number."""
        self._replay_from = self.expected
        return self.expected

    def end_replay(self) -> None:
        """Give up the gap if the replay brought no batch of it, for any reason."""
        fruitless = self._replay_from == self.expected
        self._replay_from = None
        if fruitless and self._waiting:
            self._give_up()

    def take_steps(self) -> Iterator[Step]:
        """Yield what is in order now: batches, and gaps between them."""
        steps = self._steps
        self._steps = []
        yield from steps

    def _advance(self) -> None:
        while (payload := self._waiting.pop(self.expected, None)) is not None:
            self._waiting_bytes -= len(payload)
            self._steps.append(payload)
            self.expected += 1

    def _give_up(self) -> None:
        self.gaps += 1
        self._steps.append(GAP)
        self.expected = min(self._waiting)
        self._advance()

    def _begin_anew(self) -> None:
        self.gaps += 1
        self._steps.append(GAP)
        self.expected = self._waiting_bytes = 0
        self._waiting.clear()
