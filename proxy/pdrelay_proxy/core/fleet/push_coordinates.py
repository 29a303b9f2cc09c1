"""What the router has learned about its prefill engines: one record for each, one table for its
life.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final

from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.schemas import Coordinates


class CoordinatesState(StrEnum):
    """What is known about one prefill engine."""

    UNKNOWN = auto()
    PULL = auto()  # it lends its blocks
    PUSH = auto()  # it writes them, and we know where it is
    # it pushes, but is several engines behind one address: which one is known only afterwards
    SEVERAL = auto()


class CoordinatesEvent(StrEnum):
    """What a request has brought to light."""

    PULLS = auto()
    PUSHES = auto()  # from where we know it, or we knew nothing
    ELSEWHERE = auto()  # it pushes from a place we have not seen: it was restarted
    BACK = auto()  # it pushes from a place that had been replaced: both are there


_LEARNS: Final = {
    CoordinatesEvent.PULLS: CoordinatesState.PULL,
    CoordinatesEvent.PUSHES: CoordinatesState.PUSH,
    CoordinatesEvent.BACK: CoordinatesState.SEVERAL,
}
TRANSITIONS: Final[Mapping[CoordinatesState, Mapping[CoordinatesEvent, CoordinatesState]]] = {
    CoordinatesState.UNKNOWN: _LEARNS,
    CoordinatesState.PULL: _LEARNS,
    # The request that noticed is sent again, prefill first.
    CoordinatesState.PUSH: {**_LEARNS, CoordinatesEvent.ELSEWHERE: CoordinatesState.UNKNOWN},
    CoordinatesState.SEVERAL: {
        CoordinatesEvent.PULLS: CoordinatesState.SEVERAL,
        CoordinatesEvent.PUSHES: CoordinatesState.SEVERAL,
        CoordinatesEvent.BACK: CoordinatesState.SEVERAL,
    },
}


_PULL: Final = CoordinatesState.PULL
_PUSH: Final = CoordinatesState.PUSH


@dataclass(slots=True)
class _Record:
    state: CoordinatesState = CoordinatesState.UNKNOWN
    coordinates: Coordinates | None = None  # while PUSH
    replaced: frozenset[str] = frozenset()  # engine ids of before


class PushCoordinates:
    """Remembers where prefill engines are, as they say in their answers.

    Nobody waits for anybody: requests that come before the first answer go to one engine after the
    other, and each of their answers teaches the same.
    """

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._records: dict[InstanceId, _Record] = {}

    def coordinates(self, prefill: InstanceId) -> Coordinates | None:
        """Return where a prefill engine is; None: only its next answer can tell."""
        record = self._records.get(prefill)
        return record.coordinates if self._at_once and record is not None else None

    def state(self, prefill: InstanceId) -> CoordinatesState:
        """Return what is known about a prefill engine."""
        record = self._records.get(prefill)
        return CoordinatesState.UNKNOWN if record is None else record.state

    def learn(self, prefill: InstanceId, coordinates: Coordinates | None) -> None:
        """Take in what an answer said; None: the engine does not push."""
        record = self._records.get(prefill)
        if record is None:
            record = self._records[prefill] = _Record()
        before = record.coordinates
        if coordinates is None and record.state is _PULL:
            return  # as before
        if coordinates is None:
            event = CoordinatesEvent.PULLS
        elif coordinates.remote_engine_id in record.replaced:
            event = CoordinatesEvent.BACK
        else:
            event = (
                CoordinatesEvent.PUSHES
                if before in (None, coordinates)
                else CoordinatesEvent.ELSEWHERE
            )
        record.state = TRANSITIONS[record.state][event]
        if before is not None and before != coordinates:
            record.replaced |= {before.remote_engine_id}
        record.coordinates = coordinates if record.state is _PUSH else None

    def forget(self, prefill: InstanceId) -> None:
        """It has failed: whoever answers next under this address may be another. Or it is gone."""
        self._records.pop(prefill, None)
