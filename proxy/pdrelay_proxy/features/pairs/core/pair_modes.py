"""Pull or push, for each pair of engines that can do both (our connector with ``"mode": "auto"``).

Where GPUs have neither NVLink nor RDMA between them, a read can take 100 times as long as a write,
and elsewhere it is the other way round. What counts is what a client waits for: the seconds from
the prefill engine's answer to the first event of the stream. Both ways are tried in turn until they
can be told apart, and again after ``AGAIN_S``.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.pair_history import Pair
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.protocol.push import TransferMode

# links and engines change, and each trial sends some requests the slower way
AGAIN_S: Final = 600.0
# Streams of each way, and by what factor one must then be slower on average. Prompts and queues
# differ, so a few streams tell only a large difference.
ENOUGH: Final = ((4, 3.0), (8, 1.5), (16, 1.0))
# requests of each way in a trial; clients that stream nothing show no difference
SENT_MOST: Final = 64
# that are remembered: 350 bytes each; the others go the way that their kind has learned
PAIRS_MOST: Final = 65_536
KINDS_MOST: Final = 1024  # the others are one kind

_PULL: Final = TransferMode.PULL
_PUSH: Final = TransferMode.PUSH


class WayTried:
    """One way of a pair, since its trial began."""

    __slots__ = ("seconds", "sent", "streams")

    def __init__(self) -> None:
        self.sent = 0  # requests
        self.streams = 0  # of those that were measured
        self.seconds = 0.0  # of these, added up

    @property
    def mean_s(self) -> float | None:
        """Seconds from the prefill engine's answer to the first event; None: none was measured."""
        return self.seconds / self.streams if self.streams else None


class PairMode:
    """What is known of a pair. ``chosen`` is None while both ways are tried."""

    __slots__ = ("chosen", "pull", "push", "until", "used_at")

    def __init__(self) -> None:
        self.chosen: TransferMode | None = None
        self.used_at = 0.0  # s of the router's clock
        self.until = 0.0  # s of the router's clock: then both are tried again
        self.pull = WayTried()
        self.push = WayTried()

    def next_way(self, now: float) -> TransferMode:
        """Return the way of the next request, which counts as sent."""
        self.used_at = now
        if self.chosen is not None and now < self.until:
            return self.chosen
        if self.chosen is not None:
            self.chosen = None
            self.pull = WayTried()
            self.push = WayTried()
        way, mode = (self.pull, _PULL) if self.pull.sent <= self.push.sent else (self.push, _PUSH)
        way.sent += 1
        # the default, unless all requests that went this way have failed
        if self.push.sent >= SENT_MOST:
            self._choose(_PUSH if self.push.streams and not self.pull.streams else _PULL, now)
        return mode

    def expected_way(self, now: float) -> TransferMode:
        """Return what ``next_way`` would; nothing counts as sent."""
        if self.chosen is None:
            return _PULL if self.pull.sent <= self.push.sent else _PUSH
        return self.chosen if now < self.until else _PULL

    def served(self, mode: TransferMode, seconds: float, now: float) -> None:
        """Take in a stream that went this way."""
        way = self.pull if mode is _PULL else self.push
        way.streams += 1
        way.seconds += seconds
        pull_s = self.pull.mean_s
        push_s = self.push.mean_s
        if self.chosen is not None or pull_s is None or push_s is None:
            return
        count = min(self.pull.streams, self.push.streams)
        slower = max(pull_s, push_s)
        faster = min(pull_s, push_s)
        if any(count >= streams and slower >= factor * faster for streams, factor in ENOUGH):
            self._choose(_PULL if pull_s <= push_s else _PUSH, now)

    def _choose(self, mode: TransferMode, now: float) -> None:
        self.chosen = mode
        self.until = now + AGAIN_S


class PairModes:
    """Each router learns by itself.

    As many pairs have trials of their own as there is room for. All others of a kind have one
    together: were one of them forgotten for another, then in a fleet with more pairs than room each
    would always be new, and no trial end.
    """

    def __init__(
        self,
        *,
        kind: Callable[[Pair], Hashable] = lambda _: None,
        most: int = PAIRS_MOST,
    ) -> None:
        """``kind``: names pairs that have such a link."""
        self._kind = kind
        self._most = most
        # the one that was used last is the last
        self._pairs: OrderedDict[Pair, PairMode] = OrderedDict()
        self._kinds: dict[Hashable, PairMode] = {}  # of pairs that are not remembered
        self._known: frozenset[InstanceId] = frozenset()
        self.has_any = False

    def __len__(self) -> int:
        return len(self._pairs)

    def next_way(self, pair: Pair, *, now: float) -> TransferMode:
        """Return the way of the next request of a pair."""
        learned = self._pairs.get(pair)
        if learned is None:
            learned = self._new(pair, now)
        else:
            self._pairs.move_to_end(pair)
        return learned.next_way(now)

    def expected_way(self, pair: Pair, *, now: float) -> TransferMode:
        """Return what ``next_way`` would; nothing counts as sent."""
        learned = self._pairs.get(pair)
        if (
            learned is None
            and len(self._pairs) >= self._most
            and not self._is_free(next(iter(self._pairs)), now)
        ):
            learned = self.get(pair)
        return _PULL if learned is None else learned.expected_way(now)

    def served(self, pair: Pair, mode: TransferMode, seconds: float, *, now: float) -> None:
        """Take in how long a stream of a pair took from the prefill engine's answer to its first
        event.
        """
        learned = self.get(pair)
        if learned is not None:
            learned.served(mode, seconds, now)

    def get(self, pair: Pair) -> PairMode | None:
        """Return what is known of a pair, or of its kind; None: it has no choice, or was not
        used.
        """
        learned = self._pairs.get(pair)
        if learned is None and self._kinds:
            return self._kinds.get(self._kind(pair), self._kinds.get(None))
        return learned

    def forget(self, engine: InstanceId) -> None:
        """An engine is another one by now."""
        self._drop([pair for pair in self._pairs if engine in pair])

    def keep(self, engines: frozenset[InstanceId]) -> None:
        """Forget the pairs of engines that are no longer known."""
        if engines != self._known:  # to look through all of them takes milliseconds
            self._known = engines
            self._drop([pair for pair in self._pairs if not engines.issuperset(pair)])

    def _new(self, pair: Pair, now: float) -> PairMode:
        """Begin to remember a pair, if there is room, or one that was not used for so long that it
        is tried again.
        """
        self.has_any = True
        if len(self._pairs) >= self._most:
            oldest = next(iter(self._pairs))
            if not self._is_free(oldest, now):
                return self._of_kind(self._kind(pair), now)
            del self._pairs[oldest]
        learned = self._pairs[pair] = PairMode()
        return learned

    def _is_free(self, oldest: Pair, now: float) -> bool:
        """Tell whether the place of a pair is another one's, because it would be tried again
        anyway.
        """
        return now >= self._pairs[oldest].used_at + AGAIN_S

    def _of_kind(self, kind: Hashable, now: float) -> PairMode:
        if kind not in self._kinds and len(self._kinds) >= KINDS_MOST:
            self._kinds = {
                kept: mode for kept, mode in self._kinds.items() if now < mode.used_at + AGAIN_S
            }
            kind = kind if len(self._kinds) < KINDS_MOST else None
        return self._kinds.setdefault(kind, PairMode())

    def _drop(self, pairs: list[Pair]) -> None:
        for pair in pairs:
            del self._pairs[pair]
        if not self._pairs:
            self._kinds.clear()
        self.has_any = len(self._pairs) > 0


def link_kind(find: Callable[[InstanceId], Member | None], pair: Pair) -> Hashable:
    """Name the kind of the link between two engines: pairs of one kind differ in nothing that is
    known.
    """
    members = [member for name in pair if (member := find(name)) is not None]
    hosts = {member.instance.address.host for member in members}
    facts = [
        fact
        for member in members
        for fact in (member.facts.mode, member.facts.revision, member.facts.slice)
    ]
    return (*facts, len(hosts) < len(members))
