"""The legs that are under way: how many each engine has, and how long a request hung between its two legs."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import auto
from typing import Final, TypeAlias

from xpyd_proxy.core.fast_enum import Word
from xpyd_proxy.core.model import Instance, InstanceId, RequestId, Role

_PROMISED: Final = (
    4096  # answers of prefill engines that may wait for their decode leg; those of clients that left stay
)


class State(Word):
    """Where one leg is."""

    SENT = auto()
    ANSWERED = auto()  # prefill: its whole answer is here; decode: the first event of it
    OVER = auto()


class Event(Word):
    """What a leg can do."""

    ANSWER = auto()
    END = auto()


# Watching must never be what breaks a request, so this table has no holes: what is over stays over.
TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.SENT: {Event.ANSWER: State.ANSWERED, Event.END: State.OVER},
    State.ANSWERED: {Event.ANSWER: State.ANSWERED, Event.END: State.OVER},
    State.OVER: {Event.ANSWER: State.OVER, Event.END: State.OVER},
}

_Key: TypeAlias = tuple[InstanceId, RequestId]


@dataclass(slots=True)
class _Leg:
    """One leg that is not over."""

    since: float
    promised: bool  # the decode leg of a request whose prefill engine has answered
    state: State = State.SENT


class Legs:
    """Follows legs by instance and request. Time is seconds on any clock that does not run backwards."""

    def __init__(self) -> None:
        self._open: dict[_Key, _Leg] = {}
        self._answered: dict[RequestId, float] = {}  # when prefill engines answered, the oldest first
        self._in_flight: Counter[InstanceId] = Counter()
        self._promised: Counter[InstanceId] = Counter()
        self.riding: Callable[[], Iterable[InstanceId]] = tuple  # the engines of the legs under way

    @property
    def promised(self) -> Mapping[InstanceId, int]:
        """Return how many legs each decode engine has begun to answer that followed their prefill leg, ever."""
        return self._promised

    @property
    def in_flight(self) -> Mapping[InstanceId, int]:
        """Return how many legs each engine has now; engines without one are missing."""
        return self._in_flight + Counter(self.riding())

    def promise(self, decode: InstanceId) -> None:
        """Count a leg that a decode engine has begun to answer, and that followed its prefill leg."""
        self._promised[decode] += 1

    def began(self, instance: Instance, request: RequestId, *, now: float) -> float | None:
        """Follow a leg; return the handoff gap in seconds if it is a decode leg that follows its prefill leg."""
        key = instance.id, request
        if key not in self._open:
            self._count(instance.id, 1)
        answered = self._answered.pop(request, None) if instance.role is Role.DECODE else None
        self._open[key] = _Leg(now, answered is not None)
        return None if answered is None else now - answered

    def answered(self, instance: Instance, request: RequestId, *, now: float) -> None:
        """Note that the engine has answered."""
        leg = self._open.get((instance.id, request))
        if leg is None:
            return
        if leg.promised and leg.state is State.SENT:
            self.promise(instance.id)
        leg.state = TRANSITIONS[leg.state][Event.ANSWER]
        if instance.role is Role.DECODE:
            return
        self._answered[request] = now
        while len(self._answered) > _PROMISED:
            del self._answered[next(iter(self._answered))]

    def ended(self, instance: Instance, request: RequestId, *, now: float) -> float | None:
        """Stop following a leg; return the seconds it took, or None if nobody saw it begin."""
        leg = self._open.pop((instance.id, request), None)
        if leg is None:
            return None
        leg.state = TRANSITIONS[leg.state][Event.END]
        self._count(instance.id, -1)
        return now - leg.since

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Forget what was counted of instances that are no longer known."""
        for gone in self._promised.keys() - instances:
            del self._promised[gone]

    def _count(self, instance: InstanceId, change: int) -> None:
        left = self._in_flight[instance] + change
        if left:
            self._in_flight[instance] = left
        else:
            del self._in_flight[instance]
