"""How many streams have moved, and how long they paused."""

from collections import Counter
from collections.abc import Iterator

from pdrelay_proxy.core.counters import FIRST_TOKEN, Histogram
from pdrelay_proxy.core.request_record import MoveOutcome, MoveReason
from pdrelay_proxy.io.metric_families import Family, counter_family, histogram_family


class MoveCounts:
    """What one router counts."""

    def __init__(self) -> None:
        self.moved = Counter[tuple[MoveReason, MoveOutcome]]()
        self.gaps = Histogram(FIRST_TOKEN)  # seconds from the cut to the next event

    def count(self, reason: MoveReason, outcome: MoveOutcome, gap_s: float | None) -> None:
        """Count a stream that has moved, so long after it was cut; or that has not."""
        self.moved[reason, outcome] += 1
        if gap_s is not None:
            self.gaps.observe(gap_s)

    def families(self) -> Iterator[Family]:
        """Return its metrics."""
        text = (
            "Streams that were to leave their engine, by why (drain, kv_room) and by what became "
            "of them."
        )
        moved = list(self.moved.items())
        yield from counter_family("pdrelay_streams_moved", text, ("reason", "outcome"), moved)
        text = "Seconds from the cut of a stream that moves to its next event."
        yield histogram_family("pdrelay_stream_move_seconds", text, (), [((), self.gaps)])
