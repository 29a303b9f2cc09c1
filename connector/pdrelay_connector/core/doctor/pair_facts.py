"""What an examination has found out about two ends: numbers and words, no judgement."""

from typing import Literal, TypeAlias

import msgspec

from pdrelay_connector.core.doctor.examination import EndFacts, Measurement, Operation
from pdrelay_connector.core.messages import Fingerprint

End: TypeAlias = Literal["here", "there"]


class ClockOffset(msgspec.Struct, frozen=True):
    """By how much the clock there is ahead of the one here; the truth lies within ``error`` of
    it.
    """

    seconds: float
    error: float


class MeasuredBy(msgspec.Struct, frozen=True):
    """A measurement, which end made it, and the rate of its worst round (GB/s)."""

    end: End
    measurement: Measurement
    worst_rate: float


class PairFacts(msgspec.Struct, kw_only=True):
    """All that is known; what could not be found out is absent."""

    address: str  # that was dialled
    here: EndFacts
    there: EndFacts | None = None
    model_here: Fingerprint | None = None
    model_there: Fingerprint | None = None
    connect_failure: str = ""  # why the ends have not met
    lost: str = ""  # why the examination ended early
    clock: ClockOffset | None = None
    back_address: str = ""  # where this end listened for the connection back
    back_failure: str | None = None  # why it did not come; "" if it did, absent if it was not tried
    measurements: list[MeasuredBy] = []
    transports_here: tuple[str, ...] = ()  # that UCX has used, by its own log
    transports_there: tuple[str, ...] = ()

    def measured(self, end: End, operation: Operation) -> Measurement | None:
        """Return a measurement that was made, failed or not."""
        kept = self.kept(end, operation)
        return None if kept is None else kept.measurement

    def kept(self, end: End, operation: Operation) -> MeasuredBy | None:
        """Return the same with its worst rate."""
        found = (each for each in self.measurements if each.end == end)
        return next((each for each in found if each.measurement.operation == operation), None)
