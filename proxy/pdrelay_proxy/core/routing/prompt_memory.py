"""Which engine has which prompts in its cache, as far as the router knows from what it has sent and
what came back.

Engines do not say what they evict, so all of it is a guess with a lifetime: it decides where a
request goes, and never what is right. The blocks of a prompt are remembered from its end to its
beginning, so an engine that has one has all those before it: the longest match is found by halves.
"""

from collections import OrderedDict
from typing import Final, TypeAlias

from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.prompt_blocks import PromptBlocks

PREFIX_LIFETIME_S: Final = 1800.0  # without use; then an engine is taken to have evicted it
ENTRIES_MOST: Final = 100_000  # of all prompts and engines: about 30 MB
_EVENTS_S: Final = 0.25  # for so long an engine's events may come later than its answer
_IS_THERE: Final = True  # see _Entry, whose arguments cost 1,000 instructions more by name
_IS_NEW: Final = False  # likewise, not there yet
_IS_COMING: Final = True
_HAS_COME: Final = False
_Key: TypeAlias = tuple[InstanceId, int]


class _Entry:
    """What is remembered of some blocks; those that were sent together share it.

    It does not change.

    Blocks that are there are coming as well when a prompt with them is sent again: the engine may
    have evicted them.
    """

    __slots__ = ("answer", "answered_at", "at", "is_coming", "is_there")

    def __init__(
        self,
        at: float,
        is_there: bool,  # noqa: FBT001
        is_coming: bool,  # noqa: FBT001
        answer: int = 0,
        answered_at: float = 0.0,
    ) -> None:
        self.at = at  # when a prompt with it was sent there last, or came from there
        self.is_there = is_there  # an answer has shown it
        self.is_coming = is_coming  # it was sent since it arrived last
        self.answer = answer  # bytes of the answer to the prompt that ends with it; 0: none does
        # when it came: that the prompt is sent again does not use the answer
        self.answered_at = answered_at


class PromptMemory:
    """The blocks by engine; the oldest are forgotten first.

    Times are seconds of a clock that only rises.

    ``since``: from when on the engine's cache is the one it has now; what was sent before is lost.
    """

    def __init__(self, lifetime_s: float, *, most: int = ENTRIES_MOST) -> None:
        self._lifetime_s = lifetime_s  # without use
        self._most = most
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._shrinks_at = 0.0  # before that nothing is too old
        self.changes = 0  # but for time, what was matched stays true while this is the same

    def __len__(self) -> int:
        return len(self._entries)

    def sent(self, engine: InstanceId, blocks: PromptBlocks, *, since: float, now: float) -> None:
        """A prompt is sent to an engine, which will have it in its cache."""
        self.changes += 1
        new: _Entry | None = None
        there: _Entry | None = None
        entries = self._entries
        oldest = max(since, now - self._lifetime_s)
        for name in blocks.names[::-1]:
            key = engine, name
            old = entries.get(key)
            if old is None or not old.is_there or old.at < oldest:
                if new is None:
                    new = _Entry(now, _IS_NEW, _IS_COMING)
                entries[key] = new
            elif old.answer:
                entries[key] = _Entry(now, _IS_THERE, _IS_COMING, old.answer, old.answered_at)
            else:
                if there is None:
                    there = _Entry(now, _IS_THERE, _IS_COMING)
                entries[key] = there
            if old is not None:  # to take it out and put it in again costs twice as much
                entries.move_to_end(key)
        if now >= self._shrinks_at or len(entries) > self._most:
            self._shrink(now)

    def answered(
        self, engine: InstanceId, blocks: PromptBlocks, answer: int, *, now: float
    ) -> None:
        """An engine has decoded a prompt: this and so many bytes of answer are in its cache."""
        self.changes += 1
        if not blocks.names:
            return
        there: _Entry | None = None
        entries = self._entries
        is_last = True
        for name in blocks.names[::-1]:
            key = engine, name
            old = entries.get(key)
            if is_last:
                entries[key] = _Entry(now, _IS_THERE, _HAS_COME, answer, now)
                is_last = False
            elif old is not None and old.answer:
                entries[key] = _arrived(old, now)
            else:
                if there is None:
                    there = _Entry(now, _IS_THERE, _HAS_COME)
                entries[key] = there
            if old is not None:
                entries.move_to_end(key)
        if now >= self._shrinks_at or len(entries) > self._most:
            self._shrink(now)

    def arrived(self, engine: InstanceId, blocks: PromptBlocks, *, now: float) -> None:
        """An engine has computed a prompt: it is there, and no longer on its way."""
        self.changes += 1
        entries = self._entries
        there = _Entry(now, _IS_THERE, _HAS_COME)
        for name in blocks.names:
            key = engine, name
            old = entries.get(key)
            if old is not None and old.is_coming:
                entries[key] = _arrived(old, now) if old.answer else there

    def on_its_way(
        self, engine: InstanceId, blocks: PromptBlocks, *, since: float, now: float
    ) -> int:
        """Return how many bytes of a prompt an engine will have once it has computed what it was
        sent; 0: nothing new.

        What has arrived counts for a moment, until the engine's events tell of it; later it may be
        gone again.
        """
        oldest = now - self._lifetime_s
        if since > oldest:  # noqa: PLR1730 (a call of ``max`` takes as long as a step of the search)
            oldest = since
        low, entry = self._deepest(engine, blocks, oldest, is_there=False)
        return (
            0
            if entry is None or (not entry.is_coming and now > entry.at + _EVENTS_S)
            else blocks.ends[low - 1]
        )

    def matched(
        self,
        engine: InstanceId,
        blocks: PromptBlocks,
        *,
        since: float,
        now: float,
        is_there: bool = False,
    ) -> int:
        """Return how many bytes of a prompt it has; ``is_there``: none that are on their way."""
        oldest = now - self._lifetime_s
        if since > oldest:  # noqa: PLR1730 (as above)
            oldest = since
        low, entry = self._deepest(engine, blocks, oldest, is_there=is_there)
        if entry is None:
            return 0
        end = blocks.ends[low - 1]
        if not entry.answer or entry.answered_at < oldest:
            return end
        return end + min(entry.answer, blocks.generated(low - 1))

    def _deepest(
        self, engine: InstanceId, blocks: PromptBlocks, oldest: float, *, is_there: bool
    ) -> tuple[int, _Entry | None]:
        """Return how many blocks an engine has, and what is remembered of the last one."""
        entries = self._entries
        names = blocks.names
        last: _Entry | None = None
        # it has the first ``low`` blocks, and not that with the index ``high``
        low = 0
        high = len(names)
        while low < high:
            middle = (low + high) // 2
            entry = entries.get((engine, names[middle]))
            if entry is None or entry.at < oldest or (is_there and not entry.is_there):
                high = middle
            else:
                low = middle + 1
                last = entry
        return low, last

    def forget(self, engine: InstanceId, blocks: PromptBlocks, cached: int) -> None:
        """An engine has no more than the first ``cached`` bytes of a prompt."""
        self.changes += 1
        for name, end in zip(blocks.names, blocks.ends, strict=True):
            if end > cached:
                self._entries.pop((engine, name), None)

    def _shrink(self, now: float) -> None:
        entries = self._entries
        oldest = now - self._lifetime_s
        while entries:
            key, entry = next(iter(entries.items()))
            if len(entries) <= self._most and entry.at >= oldest:
                self._shrinks_at = entry.at + self._lifetime_s
                break
            del entries[key]


def _arrived(old: _Entry, now: float) -> _Entry:
    """Return the entry of a block that has arrived, with what is known of the answer behind it."""
    return _Entry(now, _IS_THERE, _HAS_COME, old.answer, old.answered_at)
