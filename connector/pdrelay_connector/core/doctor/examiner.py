"""The dialling end of ``pdrelay doctor``: runs through a list of steps, and records the results."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from pdrelay_connector.core.doctor.examination import (
    ClockProbe,
    ClockReply,
    Content,
    DialBack,
    DialedBack,
    Introduction,
    Measure,
    Measured,
    Measurement,
    Operation,
    printable,
    shortened,
    unwrap,
    wrap,
)
from pdrelay_connector.core.doctor.pair_facts import ClockOffset, End, MeasuredBy, PairFacts
from pdrelay_connector.core.doctor.probe import Probe, ScratchPair
from pdrelay_connector.core.doctor.respondent import RESPONDENT
from pdrelay_connector.core.ids import Address, ConnId
from pdrelay_connector.core.messages import (
    Examination,
    Message,
    RankInfo,
    RankMemory,
    Refusal,
    Welcome,
)
from pdrelay_connector.core.ports import (
    ConnectFailed,
    ConnectionLost,
    Link,
    LinkEvent,
    MessageReceived,
    PeerConnected,
    TransferAgent,
)
from pdrelay_connector.errors import ConnectorError, ProtocolViolation, TransferError

CLOCK_PROBES: Final = 8  # of which the one with the shortest way counts
ROUNDS: Final = 2  # of the four measurements


class _AskClock(NamedTuple):
    """Ask for the time."""


class _AskBack(NamedTuple):
    """Ask for a connection back."""

    order: DialBack


class _Test(NamedTuple):
    """Have one end measure."""

    end: End
    order: Measure


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be examined, and within which times (s)."""

    block_bytes: int
    seconds: float  # of each of the four throughputs
    timeout: float  # of each step
    back: DialBack | None = None  # where this end listens; absent if no connection back is wanted


class Examiner:
    """Usable with any link and transfer agent; one thread owns it. ``wall``: s since the epoch."""

    def __init__(
        self,
        link: Link,
        agent: TransferAgent,
        own: RankInfo,
        facts: PairFacts,
        plan: Plan,
        *,
        transports: Callable[[], tuple[str, ...]],
    ) -> None:
        """``facts`` gets the results; ``transports`` returns what UCX has used here so far."""
        self._link = link
        self._agent = agent
        self._own = own
        self._plan = plan
        self._transports = transports
        self.facts = facts
        self.is_done = False
        self._conn: ConnId | None = None  # absent before start()
        # absent before the other end's Welcome, or if it cannot be reached
        self._memory: ScratchPair | None = None
        self._objection = ""  # why it cannot
        self._probe: Probe | None = None  # a measurement of this end
        self._steps = deque(_steps(plan))
        self._step: _AskClock | _AskBack | _Test | None = None  # that waits for an answer
        self._deadline: float | None = None  # of what is waited for
        # when the clock was asked for: monotonic, wall
        self._clock_asked_at: tuple[float, float] = (0.0, 0.0)

    def start(self, address: Address, *, now: float) -> None:
        """Begin to connect."""
        self._conn = self._link.connect(address, RESPONDENT)
        self._deadline = now + 3 * self._plan.timeout

    def on(self, event: LinkEvent, *, now: float, wall: float) -> None:
        """Take in an event."""
        if self.is_done or event.conn != self._conn:
            return
        try:
            match event:
                case PeerConnected(conn, welcome):
                    self._on_welcome(conn, welcome, now)
                case ConnectFailed(_, reason):
                    self.facts.connect_failure = reason
                    self.is_done = True
                case ConnectionLost(_, reason):
                    self._stop(f"the connection was lost: {reason}")
                case MessageReceived(_, message):
                    self._received(message, now=now, wall=wall)
        except ConnectorError as exc:
            self._stop(str(exc))

    def advance(self, *, now: float, wall: float) -> float | None:
        """Do what is due; return when to be called again at the latest, None for never."""
        if self.is_done or self._conn is None:
            return None
        if self._probe is not None:
            result = self._probe.on(self._agent.poll(), now=now) or self._probe.advance(now=now)
            if result is not None:
                self._probe = None
                self._measured("here", result, now=now, wall=wall)
            return now
        if self._deadline is not None and now >= self._deadline:
            self._overdue()
        return self._deadline

    def _on_welcome(self, conn: ConnId, welcome: Welcome, now: float) -> None:
        if welcome.fingerprint.layers:  # none: it was given no model
            self.facts.model_there = welcome.fingerprint
        if len(welcome.ranks) != 1:
            raise ProtocolViolation(f"an end of {len(welcome.ranks)} memories")
        try:
            self._memory = ScratchPair.from_regions(
                self._agent.attach(welcome.ranks[0]), welcome.ranks[0], self._own
            )
        except TransferError as exc:  # the side channel works all the same: find out what else does
            self._objection = str(exc)
        self._link.send(conn, RankMemory(self._own))
        self._send(Introduction(self.facts.here))
        self._deadline = now + self._plan.timeout

    def _received(self, message: Message, *, now: float, wall: float) -> None:
        match message:
            case Refusal(reason):
                self._stop(f"it refused: {shortened(reason)}")
            case Examination():
                self._answered(unwrap(message), now=now, wall=wall)
            case _:
                raise ProtocolViolation(f"{type(message).__name__} is no message of an examination")

    def _answered(self, content: Content, *, now: float, wall: float) -> None:
        match content, self._step:
            case Introduction(facts), None if self.facts.there is None:
                self.facts.there = printable(facts)
            case ClockReply(their_wall), _AskClock():
                self._compare_clock(their_wall, now=now)
            case DialedBack(failure), _AskBack():
                self.facts.back_failure = shortened(failure)
            case Measured(measurement, transports), _Test("there"):
                self.facts.transports_there = tuple(map(shortened, transports))
                self._note(
                    "there",
                    msgspec.structs.replace(measurement, failure=shortened(measurement.failure)),
                )
            case _:
                raise ProtocolViolation(f"{type(content).__name__} came out of turn")
        self._next(now=now, wall=wall)

    def _compare_clock(self, their_wall: float, *, now: float) -> None:
        """Compare with the middle of the exchange (as NTP does, RFC 5905, section 8)."""
        sent_at, sent_wall = self._clock_asked_at
        error = (now - self._clock_asked_at[0]) / 2
        offset = ClockOffset(their_wall - (sent_wall + (now - sent_at) / 2), error)
        if self.facts.clock is None or error < self.facts.clock.error:
            self.facts.clock = offset

    def _measured(self, end: End, measurement: Measurement, *, now: float, wall: float) -> None:
        self.facts.transports_here = self._transports()
        self._note(end, measurement)
        self._next(now=now, wall=wall)

    def _note(self, end: End, measurement: Measurement) -> None:
        """Note a result, of two rounds the better one: other load on a machine only makes it worse.

        An end that fails once is asked for nothing more, because it would wait as long again.
        """
        before = self.facts.result_of(end, measurement.operation)
        if before is None:
            self.facts.measurements.append(MeasuredBy(end, measurement, measurement.rate))
        else:
            is_kept = measurement.failure or measurement.rate > before.measurement.rate
            better = measurement if is_kept else before.measurement
            worst = min(measurement.rate, before.worst_rate)
            self.facts.measurements[self.facts.measurements.index(before)] = MeasuredBy(
                end, better, worst
            )
        if measurement.failure:
            self._steps = deque(
                step for step in self._steps if not (isinstance(step, _Test) and step.end == end)
            )

    def _next(self, *, now: float, wall: float) -> None:
        """Begin the next step, or end."""
        if not self._steps:
            self._stop("")
            return
        self._step = step = self._steps.popleft()
        self._deadline = now + self._plan.timeout
        match step:
            case _AskClock():
                self._clock_asked_at = now, wall
                self._send(ClockProbe())
            case _AskBack(order):
                self._deadline = now + 3 * self._plan.timeout  # connecting, TLS and the proof there
                self._send(order)
            case _Test("there", order):
                self._deadline = now + 2 * self._plan.timeout
                self._send(order)
            case _Test(_, order):
                self._begin(order, now=now, wall=wall)

    def _begin(self, order: Measure, *, now: float, wall: float) -> None:
        if self._memory is None:
            failed = Measurement(
                order.operation, order.block_bytes, failure=shortened(self._objection)
            )
            self._measured("here", failed, now=now, wall=wall)
            return
        probe = Probe(self._agent, self._memory, order, now=now)
        if (at_once := probe.start()) is not None:
            self._measured("here", at_once, now=now, wall=wall)
        else:
            self._probe = probe

    def _overdue(self) -> None:
        if isinstance(self._step, _AskBack):  # its answer would come out of turn
            self.facts.back_failure = "no answer in time"
        self._stop("the other end does not answer any more")

    def _send(self, content: Content) -> None:
        if self._conn is not None:
            self._link.send(self._conn, wrap(content))

    def _stop(self, reason: str) -> None:
        self.facts.lost = reason
        self.is_done = True
        if self._conn is not None:
            self._link.close(self._conn)


def _steps(plan: Plan) -> Sequence[_AskClock | _AskBack | _Test]:
    operations: tuple[Operation, ...] = ("READ", "WRITE")
    ends: tuple[End, ...] = ("here", "there")
    return (
        *(_AskClock() for _ in range(CLOCK_PROBES)),
        *([_AskBack(plan.back)] if plan.back is not None else []),
        *(
            _Test(end, Measure(operation, plan.block_bytes, plan.seconds / ROUNDS, plan.timeout))
            for _ in range(ROUNDS)
            for end in ends
            for operation in operations
        ),
    )
