"""The waiting end of ``pdrelay doctor``: serves one partner at a time, which proved the secret."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdrelay_connector.core.doctor.examination import (
    ClockProbe,
    ClockReply,
    Content,
    DialBack,
    DialedBack,
    EndFacts,
    Introduction,
    Measure,
    Measured,
    Measurement,
    shortened,
    unwrap,
    wrap,
)
from pdrelay_connector.core.doctor.probe import Probe, ScratchPair
from pdrelay_connector.core.ids import Address, ConnId, EngineId
from pdrelay_connector.core.messages import Examination, Message, RankInfo, RankMemory, Refusal
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

RESPONDENT: Final = EngineId("pdrelay-doctor")  # what a waiting end is called
LONGEST_VISIT: Final = 300.0  # s that one partner may stay
IDLE_POLL: Final = 1.0  # s between two looks at the partner's time


@dataclass(slots=True)
class _Visit:
    """The present partner, and its examination."""

    conn: ConnId
    until: float
    name: str = ""
    memory: ScratchPair | None = None  # absent before its RankMemory, or if it cannot be reached
    objection: str = ""  # why it cannot
    probe: Probe | None = None
    back: ConnId | None = None  # the connection back that is being opened


class Respondent:
    """Usable with any link and transfer agent; one thread owns it. ``wall``: s since the epoch."""

    def __init__(
        self,
        link: Link,
        agent: TransferAgent,
        own: RankInfo,
        facts: EndFacts,
        *,
        transports: Callable[[], tuple[str, ...]],
        say: Callable[[str], None],
    ) -> None:
        """``transports`` returns what UCX has used here; ``say`` gets lines for the operator."""
        self._link = link
        self._agent = agent
        self._own = own
        self._facts = facts
        self._transports = transports
        self._say = say
        self._visit: _Visit | None = None
        self.visits = 0  # that have ended

    def on(self, event: LinkEvent, *, now: float, wall: float) -> None:
        """Take in an event."""
        visit = self._visit
        match event:
            case MessageReceived(conn, message):
                if visit is None:
                    visit = self._visit = _Visit(conn, now + LONGEST_VISIT)
                if conn != visit.conn:
                    self._turn_away(
                        conn, "this end examines another machine; try again when it is done"
                    )
                    return
                self._received(visit, message, now=now, wall=wall)
            case ConnectionLost(conn, reason) if visit is not None and conn == visit.conn:
                self._end(f"{visit.name or 'the other end'} has gone: {reason}")
            case PeerConnected(conn, _) if visit is not None and conn == visit.back:
                self._link.close(conn)
                self._dialed_back(visit, "")
            case ConnectFailed(conn, reason) if visit is not None and conn == visit.back:
                self._dialed_back(visit, reason)
            case _:
                # of a partner that was turned away, or of a connection back that has had its answer
                pass

    def advance(self, *, now: float) -> float | None:
        """Do what is due; return when to be called again at the latest, None for never."""
        visit = self._visit
        ended = self._agent.poll()  # also what an earlier partner has left
        if visit is None:
            return None
        if now >= visit.until:
            self._turn_away(visit.conn, f"an examination may take {LONGEST_VISIT:g} s at most")
            self._end("the other end took too long")
            return None
        if visit.probe is None:
            return min(visit.until, now + IDLE_POLL)
        if (result := visit.probe.on(ended, now=now) or visit.probe.advance(now=now)) is not None:
            visit.probe = None
            self._answer(visit, Measured(result, self._transports()))
        return now

    def _received(self, visit: _Visit, message: Message, *, now: float, wall: float) -> None:
        try:
            match message:
                case RankMemory(rank):
                    self._attach(visit, rank)
                case Examination():
                    self._examined(visit, unwrap(message), now=now, wall=wall)
                case _:
                    raise ProtocolViolation(
                        f"{type(message).__name__} is no message of an examination"
                    )
        except ConnectorError as exc:
            self._turn_away(visit.conn, str(exc))
            self._end(f"{visit.name or 'the other end'} was turned away: {exc}")

    def _attach(self, visit: _Visit, rank: RankInfo) -> None:
        if visit.memory is not None or visit.objection:
            raise ProtocolViolation("a second memory of one end")
        try:
            handle = self._agent.attach(rank)
        except TransferError as exc:  # the other end wants to know, and may measure itself
            visit.objection = str(exc)
            return
        try:
            visit.memory = ScratchPair.from_regions(handle, rank, self._own)
        except ProtocolViolation:
            self._agent.detach(handle)
            raise

    def _examined(self, visit: _Visit, content: Content, *, now: float, wall: float) -> None:
        match content:
            case Introduction(facts):
                visit.name = shortened(facts.host)
                self._say(f"examined by {visit.name} ({shortened(facts.address)})")
                self._answer(visit, Introduction(self._facts))
            case ClockProbe():
                self._answer(visit, ClockReply(wall))
            case DialBack(host, port, engine) if visit.back is None:
                visit.back = self._link.connect(Address(host, port), EngineId(engine))
            case Measure() if visit.objection:
                failed = Measurement(
                    content.operation, content.block_bytes, failure=shortened(visit.objection)
                )
                self._answer(visit, Measured(failed, self._transports()))
            case Measure() if visit.memory is not None and visit.probe is None:
                probe = Probe(self._agent, visit.memory, content, now=now)
                if (at_once := probe.start()) is not None:
                    self._answer(visit, Measured(at_once, self._transports()))
                else:
                    visit.probe = probe
            case _:
                raise ProtocolViolation(f"{type(content).__name__} came out of turn")

    def _dialed_back(self, visit: _Visit, failure: str) -> None:
        visit.back = None
        self._answer(visit, DialedBack(shortened(failure)))

    def _answer(self, visit: _Visit, content: Content) -> None:
        self._link.send(visit.conn, wrap(content))

    def _turn_away(self, conn: ConnId, reason: str) -> None:
        self._link.send(conn, Refusal(shortened(reason)))
        self._link.close(conn)

    def _end(self, news: str) -> None:
        if (visit := self._visit) is None:
            return
        if visit.back is not None:
            self._link.close(visit.back)
        if visit.memory is not None:
            self._agent.detach(visit.memory.handle)
        self._visit = None
        self.visits += 1
        self._say(news)
