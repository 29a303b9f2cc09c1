"""The legs that are under way: how many each engine has, and how long a request hung between its two legs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final, TypeAlias

from xpyd_proxy.core.model import Instance, InstanceId, RequestId, Role

_PROMISED: Final = (
    4096  # answers of prefill engines that may wait for their decode leg; those of clients that left stay
)


class State(StrEnum):
    """Where one leg is."""

    SENT = auto()
    ANSWERED = auto()  # prefill: its whole answer is here; decode: the first event of it
    OVER = auto()


class Event(StrEnum):
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

    @property
    def promised(self) -> Mapping[InstanceId, int]:
        """Return how many legs each decode engine has begun to answer that followed their prefill leg, ever."""
        return self._promised

    @property
    def in_flight(self) -> Mapping[InstanceId, int]:
        """Return how many legs each engine has now; engines without one are missing."""
        return self._in_flight

    def began(self, instance: Instance, request: RequestId, *, now: float) -> float | None:
        """Follow a leg; return the handoff gap in seconds if it is a decode leg that follows its prefill leg."""
        if (instance.id, request) not in self._open:
            self._count(instance.id, 1)
        answered = self._answered.pop(request, None) if instance.role is Role.DECODE else None
        self._open[instance.id, request] = _Leg(now, promised=answered is not None)
        return None if answered is None else now - answered

    def answered(self, instance: Instance, request: RequestId, *, now: float) -> None:
        """Note that the engine has answered."""
        leg = self._open.get((instance.id, request))
        if leg is not None and leg.promised and leg.state is State.SENT:
            self._promised[instance.id] += 1
        if self._step(instance, request, Event.ANSWER) is State.OVER or instance.role is Role.DECODE:
            return
        self._answered[request] = now
        while len(self._answered) > _PROMISED:
            del self._answered[next(iter(self._answered))]

    def ended(self, instance: Instance, request: RequestId, *, now: float) -> float | None:
        """Stop following a leg; return the seconds it took, or None if nobody saw it begin."""
        leg = self._open.get((instance.id, request))
        self._step(instance, request, Event.END)
        return None if leg is None else now - leg.since

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Forget what was counted of instances that are no longer known."""
        for gone in self._promised.keys() - instances:
            del self._promised[gone]

    def _step(self, instance: Instance, request: RequestId, event: Event) -> State:
        key = instance.id, request
        leg = self._open.get(key, _Leg(0.0, promised=False, state=State.OVER))
        before, leg.state = leg.state, TRANSITIONS[leg.state][event]
        if leg.state is State.OVER and before is not State.OVER:
            del self._open[key]
            self._count(instance.id, -1)
        return leg.state

    def _count(self, instance: InstanceId, change: int) -> None:
        self._in_flight[instance] += change
        if not self._in_flight[instance]:
            del self._in_flight[instance]
