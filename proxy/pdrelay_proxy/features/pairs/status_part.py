"""The pairs of engines on the status page."""

from collections.abc import Callable
from typing import Final

from pdrelay_proxy.core.schemas.feature_status import FeatureStatus
from pdrelay_proxy.features.pairs.core.pair_rows import worst_rows
from pdrelay_proxy.features.pairs.io.pair_notes import PairNotes
from pdrelay_proxy.features.pairs.pair_row import PairRow
from pdrelay_proxy.features.pairs.texts import duration, rate

_MOST: Final = 24
_COLUMNS: Final = (
    "Prefill",
    "Decode",
    "State",
    "Requests",
    "Failed",
    "First token",
    "KV rate",
    "Last used",
)


def status_part(pairs: Callable[[], PairNotes], clock: Callable[[], float]) -> FeatureStatus | None:
    """Describe those that fail, and then those that were used last; None: there are none."""
    notes = pairs()
    notes.keep()
    rows = worst_rows(notes.matrix, notes.health, notes.modes, notes.find, _MOST, now=clock())
    if not rows:
        return None
    return FeatureStatus(
        title="Pairs",
        state=f"{len(notes.matrix)} used lately, {notes.health.resting} resting",
        columns=_COLUMNS,
        rows=[_cells(row) for row in rows],
        words=3,
        spare=3,
    )


def _cells(row: PairRow) -> tuple[str, ...]:
    state = row.state if row.reason is None else f"{row.state}: {row.reason}"
    rest = "" if row.rest_s is None else f", tried again in {row.rest_s:.0f} s"
    return (
        row.prefill,
        row.decode,
        f"{state}{rest}",
        str(row.handovers),
        str(row.failed),
        duration(row.ttft_s),
        rate(row.bytes_per_s),
        "-" if row.last_s is None else f"{row.last_s:.0f} s ago",
    )
