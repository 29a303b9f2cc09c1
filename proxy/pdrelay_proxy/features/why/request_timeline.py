"""The timeline of one request: consecutive rows of the router, and engines' rows within legs.

All times are milliseconds since the request's head came to the router.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.request_record import LegRecord, RequestRecord

ROUTER: Final = "router"
_LEAST_MS: Final = 0.001  # of a row
_TOLERANCE_MS: Final = 1.0  # a smaller difference of an engine's clock is ignored


class EngineEvent(NamedTuple):
    """One event that an engine recorded (connector/pdrelay_connector/core/timeline.py)."""

    step: str
    at: float  # s since the epoch, by the engine's clock
    number: int = 0  # of tokens, or blocks
    request: str = ""  # its id at the engine
    note: str = ""  # of a failed load: the cause


@dataclass(frozen=True, slots=True)
class Row:
    """A period of time.

    ``leg``: the leg that it belongs to, by the engine's id; empty: a row of the router.
    """

    what: str
    where: str
    begin_ms: float
    duration_ms: float
    leg: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg. ``answered_ms``: when its answer began, or it failed; None: not yet."""

    record: LegRecord
    role: Role
    name: str  # of the request at its engine
    sent_ms: float
    answered_ms: float | None
    failure: str = ""
    transfer: str = ""  # the id of its KV transfer, in push
    streams: bool = False  # its answer is a stream


@dataclass(slots=True)
class Timeline:
    """The rows of one request."""

    total_ms: float
    rows: list[Row] = field(default_factory=list[Row])
    notes: list[str] = field(default_factory=list[str])


def legs_of(record: RequestRecord) -> list[Leg]:
    """Return the legs in the order of sending."""
    legs = [
        _leg(record, retry.leg, retry.role, failure=str(retry.reason)) for retry in record.retries
    ]
    legs += [_leg(record, leg, role) for leg, role in record.past]
    for leg, role in ((record.prefill, Role.PREFILL), (record.decode, Role.DECODE)):
        if leg is not None:
            legs.append(_leg(record, leg, role, transfer=record.transfer or ""))
    return sorted(legs, key=lambda leg: leg.sent_ms)


def _leg(
    record: RequestRecord, leg: LegRecord, role: Role, *, failure: str = "", transfer: str = ""
) -> Leg:
    sent_ms = (leg.sent_at - record.began_at) * 1e3
    answered_ms = None if leg.ms is None else sent_ms + leg.ms
    streams = role is Role.DECODE and record.ttft_s is not None
    return Leg(
        leg, role, leg.name or record.request_id, sent_ms, answered_ms, failure, transfer, streams
    )


def router_timeline(record: RequestRecord, elapsed_s: float) -> Timeline:
    """Return the router's rows, which have no gaps and add up to the whole time.

    ``elapsed_s``: the time so far of a current request, or the duration of a finished one.
    """
    timeline = Timeline(elapsed_s * 1e3)
    total = elapsed_s * 1e3
    cursor = 0.0

    def until(end: float, what: str, where: str = ROUTER, note: str = "") -> None:
        nonlocal cursor
        end = min(end, total)
        if end > cursor + _LEAST_MS:
            timeline.rows.append(Row(what, where, cursor, end - cursor, note=note))
            cursor = end

    if record.received_s is not None:
        until(record.received_s * 1e3, "receive the body")
    legs = legs_of(record)
    waited = 0.0 if record.queue_s is None else record.queue_s * 1e3
    if record.admitted_s is not None or waited:
        # without an admission it waited in vain
        ready = total if record.admitted_s is None else record.admitted_s * 1e3
        until(ready - waited, "read the request")
        until(ready, "queue")
    before = "choose engines"
    cuts = [(move, (move.cut_at - record.began_at) * 1e3) for move in record.moves]
    for leg in legs:
        while cuts and cuts[0][1] <= leg.sent_ms:
            move, at = cuts.pop(0)
            until(at, "stream", move.source)
            before = "move"
        until(leg.sent_ms, before)
        end = total if leg.answered_ms is None else leg.answered_ms
        beside = (
            f"sent at {leg.sent_ms:.1f} ms, beside the other leg"
            if leg.sent_ms < cursor - 0.05
            else ""
        )
        failed = f"failed: {leg.failure}" if leg.failure else ""
        until(
            end, f"{leg.role} leg", leg.record.instance, "; ".join(filter(None, (beside, failed)))
        )
        before = "begin again" if leg.failure else "hand over"
    if record.ttft_s is not None:
        until(record.ttft_s * 1e3, "write the first event")
        until(total, "stream", legs[-1].record.instance if legs else ROUTER)
    if record.parts is not None:
        last = "prompts"  # each has its own record and legs
    elif legs:
        last = "answer"
    else:
        last = "refuse" if record.status else "until now"
    until(total, last)
    return timeline


_HOST_MEMORY: Final = "wait for host memory"
# The activity of an engine before each event.
_ENDED: Final = {
    "queued": "API server",
    "considered": "wait in the queue",
    "load_ordered": "allocate blocks",
    "load_begun": "order to the worker",
    "peer_met": "handshake",
    "staging": _HOST_MEMORY,
    "reading": _HOST_MEMORY,
    "read": "read KV",
    "loaded": "fence",
    "load_failed": "load, failed",
    "computing": "wait for a step",
    "first_token": "first token",
    "finished": "finish",
}
_COMPUTED: Final = frozenset({"computing", "first_token", "finished"})
_NEXT_PART: Final = frozenset({"staging", "reading", "read"})  # of a load, or its end


def engine_rows(
    leg: Leg, events: Sequence[EngineEvent], timeline: Timeline, began_at: float
) -> None:
    """Add an engine's rows to a timeline, and a note if its clock differs from the router's.

    ``began_at``: when the request's head came, in seconds since the epoch by the router's clock.
    """
    where = leg.record.instance
    end = timeline.total_ms if leg.answered_ms is None else leg.answered_ms
    placed = [
        event._replace(at=(event.at - began_at) * 1e3)
        for event in sorted(events, key=lambda event: event.at)
    ]
    own = [event for event in placed if event.step in _ENDED or event.step == "arrived"]
    if own and (error := _clock_error(leg, own, end)):
        timeline.notes.append(
            f"the clock of {where} differs by about {error:+.0f} ms; its rows are moved"
        )
        placed = [event._replace(at=event.at - error) for event in placed]
        own = [event._replace(at=event.at - error) for event in own]
    for failure in dict.fromkeys(
        event.note for event in placed if event.step == "load_failed" and event.note
    ):
        timeline.notes.append(f"{where} did not get the KV ({failure}) and computed the prompt")
    rows: list[Row] = []
    if own and own[0].at > leg.sent_ms:
        rows.append(Row("reach the engine", where, leg.sent_ms, own[0].at - leg.sent_ms, where))
    # An engine may have several requests of this name: more answers or inputs, and the request that
    # released the blocks.
    for request in dict.fromkeys(event.request for event in own):
        _add_rows(rows, where, [event for event in own if event.request == request])
    rows += _on_its_way(leg, own, where)
    timeline.rows += rows
    for what, first, lasts in (
        ("write KV", "writing", ("written",)),
        (
            "lease",
            "lease_granted",
            tuple(event.step for event in placed if event.step in _LEASE_ENDS),
        ),
    ):
        timeline.rows += _span(what, where, placed, first, lasts)


def _on_its_way(leg: Leg, own: Sequence[EngineEvent], where: str) -> Sequence[Row]:
    """Return the row from an engine's result to its arrival here; none for a failed leg."""
    end = leg.answered_ms
    if end is None or leg.failure:
        return ()
    step = "first_token" if leg.streams else "finished"
    ready = [
        event.at
        for event in own
        if event.at < end - _LEAST_MS and (event.step == step or leg.role is Role.PREFILL)
    ]
    if not ready:
        return ()
    begin = ready[0] if leg.streams else ready[-1]
    return (Row("first event" if leg.streams else "answer", where, begin, end - begin, where),)


def _add_rows(rows: list[Row], where: str, events: Sequence[EngineEvent]) -> None:
    """Add the rows of one request of an engine; consecutive rows of one kind are merged."""
    begins = True
    for before, after in pairwise(events):
        what, note = _label(before, after)
        begin = before.at
        duration = after.at - before.at
        if what == _HOST_MEMORY and duration < _LEAST_MS:
            continue  # the read needs no host memory
        if rows and rows[-1].what == what and not begins:
            last = rows.pop()
            begin = last.begin_ms
            duration = last.duration_ms + duration
            note = _joined(last.note, note)
        rows.append(Row(what, where, begin, duration, where, note))
        begins = False


_LEASE_ENDS: Final = frozenset(
    {"lease_done", "lease_dropped", "lease_peer_lost", "lease_expired", "lease_revoked"}
)


def _clock_error(leg: Leg, own: Sequence[EngineEvent], end: float) -> float:
    """Return the least error of the engine's clock in ms: its first event must lie in the leg."""
    arrived = own[0].at
    if arrived < leg.sent_ms - _TOLERANCE_MS or arrived > end + _TOLERANCE_MS:
        return arrived - leg.sent_ms
    return 0.0


def _label(before: EngineEvent, after: EngineEvent) -> tuple[str, str]:
    if before.step == "computing" and after.step in _COMPUTED:
        return "compute", _counted(before.number, "token")
    if before.step == "first_token":
        return "decode", _counted(after.number, "token") if after.number else ""
    if before.step == "load_ordered" and after.step == "loaded":
        return "wait for the writes of P", _counted(before.number, "token")
    if after.step == "considered":
        return _ENDED[
            after.step
        ], f"{_counted(after.number, 'token')} cached" if after.number else ""
    if before.step == "reading" and after.step in _NEXT_PART:
        return "read KV", _counted(before.number, "block")
    if after.step == "load_failed":
        return _ENDED[after.step], after.note
    if after.step == "load_ordered":
        return _ENDED[after.step], _counted(after.number, "token")
    return _ENDED[after.step], ""


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _joined(first: str, second: str) -> str:
    return f"{first} + {second}" if first and second else first or second


def _span(
    what: str, where: str, events: Sequence[EngineEvent], first: str, lasts: Sequence[str]
) -> Sequence[Row]:
    """Return a row from the first event of one kind to the last of others; none without a first."""
    begins = [event for event in events if event.step == first]
    ends = [event for event in events if event.step in lasts]
    if not begins:
        return ()
    renewals = sum(event.step == "lease_renewed" for event in events)
    note = _counted(renewals, "renewal") if what == "lease" else _counted(len(begins), "part")
    if not ends:
        return (Row(f"{what}, not over", where, begins[0].at, 0.0, where, note),)
    ending = ends[-1].step.removeprefix("lease_") if what == "lease" else ""
    return (
        Row(
            what,
            where,
            begins[0].at,
            ends[-1].at - begins[0].at,
            where,
            f"{ending}, {note}" if ending else note,
        ),
    )
