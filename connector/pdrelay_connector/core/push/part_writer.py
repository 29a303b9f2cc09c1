"""Writes the parts of a push to the decode engine, from the cache or through a host buffer."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Final, NamedTuple, NewType

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import BlockId
from pdrelay_connector.core.layout.transfer_plan import Spans, TokenRange
from pdrelay_connector.core.ports import TransferAgent
from pdrelay_connector.core.staging.slots import HostBuffer
from pdrelay_connector.core.state_machine import transition
from pdrelay_connector.core.transfer.remote_memory import RemoteRank
from pdrelay_connector.core.transfer.transfers import (
    POLL_INTERVAL,
    QUARANTINE_POLL_INTERVAL,
    StepEnded,
    Transfers,
)
from pdrelay_connector.errors import ConnectorError, ProtocolViolation

PartWriteId = NewType("PartWriteId", int)


class PartWriteState(Enum):
    """State of one part."""

    READY = auto()
    QUEUED = auto()  # for slots of the host buffer
    COPYING = auto()  # into the host buffer
    WRITING = auto()
    ABORTING = auto()  # something is still copied or written
    OVER = auto()


class PartWriteEvent(Enum):
    """What can happen to a part."""

    QUEUED = auto()
    COPYING = auto()
    POSTED = auto()
    CANCELLED = auto()
    ENDED = auto()


TRANSITIONS: Final[Mapping[PartWriteState, Mapping[PartWriteEvent, PartWriteState]]] = {
    PartWriteState.READY: {
        PartWriteEvent.QUEUED: PartWriteState.QUEUED,
        PartWriteEvent.POSTED: PartWriteState.WRITING,
    },
    PartWriteState.QUEUED: {
        PartWriteEvent.COPYING: PartWriteState.COPYING,
        PartWriteEvent.ENDED: PartWriteState.OVER,
    },
    PartWriteState.COPYING: {
        PartWriteEvent.POSTED: PartWriteState.WRITING,
        PartWriteEvent.CANCELLED: PartWriteState.ABORTING,
        PartWriteEvent.ENDED: PartWriteState.OVER,
    },
    PartWriteState.WRITING: {
        PartWriteEvent.CANCELLED: PartWriteState.ABORTING,
        PartWriteEvent.ENDED: PartWriteState.OVER,
    },
    PartWriteState.ABORTING: {PartWriteEvent.ENDED: PartWriteState.OVER},
    PartWriteState.OVER: {},
}


class PartWriteEnded(NamedTuple):
    """The write of a part is over; ``failure``: empty if all of it has arrived."""

    part: PartWriteId
    failure: str


@dataclass(slots=True)
class _PartWrite:
    number: PartWriteId
    remote_ranks: Sequence[RemoteRank]
    token_ranges: Sequence[TokenRange]
    state: PartWriteState = PartWriteState.READY
    deadline: float = inf  # of the copy or the writes
    failure: str = ""
    engine: str = ""  # id of the one that has these ranks

    def on(self, event: PartWriteEvent) -> None:
        self.state = transition(TRANSITIONS, self.state, event, f"write of part {self.number}")


class PartWriter:
    """Runs on the transfer thread of a prefill engine's worker."""

    def __init__(
        self,
        transfer_agent: TransferAgent,
        counters: Counters,
        *,
        timeout: float,
        staging: HostBuffer[PartWriteId] | None = None,
    ) -> None:
        self._counters = counters
        self._timeout = timeout
        self._staging = staging
        self._transfers = Transfers[PartWriteId](
            transfer_agent, staging.copier if staging is not None else None, counters
        )
        self._numbers = map(PartWriteId, itertools.count(1))
        self._parts: dict[PartWriteId, _PartWrite] = {}
        self._ended: list[PartWriteEnded] = []

    def __len__(self) -> int:
        return len(self._parts)

    def write(
        self,
        remote_ranks: Sequence[RemoteRank],
        token_ranges: Sequence[TokenRange],
        *,
        engine: str = "",
        now: float,
    ) -> PartWriteId:
        """Write these tokens to every rank of ``engine`` that needs heads of ours.

        :class:`PartWriteEnded` follows.

        Raises a ``ConnectorError`` if nothing was started.
        """
        part = _PartWrite(next(self._numbers), remote_ranks, token_ranges, engine=engine)
        self._parts[part.number] = part
        try:
            if self._staging is None:
                self._post(part, now)
            else:
                self._queue(part, self._staging)
        except ConnectorError as exc:
            if not self._transfers.is_active(part.number):
                del self._parts[part.number]
                raise
            self._abort(part, str(exc))
        else:
            self._finish_if_over(part)
        return part.number

    def cancel(self, number: PartWriteId, reason: str) -> None:
        """Abort a part; :class:`PartWriteEnded` follows when it can no longer change any memory."""
        part = self._parts.get(number)
        if part is not None and part.state is not PartWriteState.ABORTING:
            self._abort(part, reason)

    def advance(self, *, now: float) -> list[PartWriteEnded]:
        """Poll NIXL and the copier; return the parts that are over."""
        for step in self._transfers.poll():
            self._on_step_ended(step, now)
        if self._staging is not None:
            self._copy_granted(self._staging, now)
        ended = self._ended
        self._ended = []
        return ended

    def overdue(self, *, now: float) -> list[PartWriteId]:
        """Return the parts whose copy or write has exceeded its time."""
        return [part.number for part in self._parts.values() if now >= part.deadline]

    def due(self, *, now: float) -> float | None:
        """Return when to poll again; None while nothing is in flight."""
        if self._ended:
            return now
        if any(
            part.state in (PartWriteState.COPYING, PartWriteState.WRITING)
            for part in self._parts.values()
        ):
            return now + POLL_INTERVAL
        return now + QUARANTINE_POLL_INTERVAL if self._parts else None

    def _queue(self, part: _PartWrite, staging: HostBuffer[PartWriteId]) -> None:
        counts = [0] * staging.slots.groups
        for tokens in part.token_ranges:
            if 0 in tokens.local:
                raise ProtocolViolation(
                    f"tokens {tokens.start} to {tokens.stop} of group {tokens.group} are not held"
                )
            counts[tokens.group] = len(tokens.local)
        staging.slots.enqueue(part.number, counts)
        part.on(PartWriteEvent.QUEUED)

    def _copy_granted(self, staging: HostBuffer[PartWriteId], now: float) -> None:
        """Start to copy the parts that have got their slots."""
        for number, granted in staging.slots.take_granted():
            part = self._parts[number]
            blocks: list[Sequence[BlockId]] = [()] * staging.slots.groups
            for tokens in part.token_ranges:
                blocks[tokens.group] = tokens.local
            part.token_ranges = [
                tokens._replace(local=granted[tokens.group]) for tokens in part.token_ranges
            ]
            part.on(PartWriteEvent.COPYING)
            self._transfers.add_copy(number, staging.copier.out(blocks, granted))
            part.deadline = now + self._timeout

    def _post(self, part: _PartWrite, now: float) -> None:
        self._transfers.write(part.number, _spans_by_handle(part), peer=part.engine)
        part.on(PartWriteEvent.POSTED)
        part.deadline = now + self._timeout

    def _on_step_ended(self, step: StepEnded[PartWriteId], now: float) -> None:
        part = self._parts[step.owner]
        if step.failure and part.state in (PartWriteState.COPYING, PartWriteState.WRITING):
            self._abort(
                part,
                f"it was not copied into host memory: {step.failure}"
                if step.is_copy
                else step.failure,
            )
            return
        if part.state is PartWriteState.COPYING:
            self._counters.count("bytes_staged_out", step.copied_bytes)
            try:
                self._post(part, now)
            except ConnectorError as exc:
                self._abort(part, str(exc))
                return
        self._finish_if_over(part)

    def _abort(self, part: _PartWrite, reason: str) -> None:
        part.failure = reason
        if self._transfers.is_active(part.number):
            if part.state is PartWriteState.READY:
                part.on(PartWriteEvent.POSTED)
            part.on(PartWriteEvent.CANCELLED)
            part.deadline = inf
            self._transfers.cancel(part.number)
        else:
            self._finish(part)

    def _finish_if_over(self, part: _PartWrite) -> None:
        if not self._transfers.is_active(part.number) and part.state is not PartWriteState.QUEUED:
            self._finish(part)

    def _finish(self, part: _PartWrite) -> None:
        part.on(PartWriteEvent.ENDED)
        del self._parts[part.number]
        if self._staging is not None:
            self._staging.slots.release(part.number)
        self._ended.append(PartWriteEnded(part.number, part.failure))


def _spans_by_handle(part: _PartWrite) -> Iterator[tuple[str, Spans]]:
    for remote_rank in part.remote_ranks:
        spans = remote_rank.route.spans(part.token_ranges)
        if len(spans):
            yield remote_rank.handle, spans
