"""What an examination has found out about two ends: numbers and words, no judgement."""

from typing import Literal, TypeAlias

import msgspec

from pdrelay_connector.core.doctor.examination import EndFacts, Measurement, Operation
from pdrelay_connector.core.messages import Fingerprint

End: TypeAlias = Literal["here", "there"]


class ClockOffset(msgspec.Struct, frozen=True):
    """By how much the clock there is ahead of the one here, within ``error``."""

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
        result = self.result_of(end, operation)
        return None if result is None else result.measurement

    def result_of(self, end: End, operation: Operation) -> MeasuredBy | None:
        """Return a measurement with the worst rate of its rounds."""
        results = (result for result in self.measurements if result.end == end)
        return next(
            (result for result in results if result.measurement.operation == operation), None
        )
