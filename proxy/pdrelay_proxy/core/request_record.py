"""The record of one request: its engines, the time of each part, and how it ended.

The request fills it in as it goes through the states of requests/lifecycle.py. Response headers,
counters, histograms, the status page, the access log and spans are all made from it.
"""

from enum import auto
from typing import Final

from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.milliseconds import written_ms
from pdrelay_proxy.core.model import (
    InstanceId,
    LegOrder,
    RequestId,
    Role,
    SingleEngineReason,
    TransferId,
)
from pdrelay_proxy.core.protocol.fault_table import Failure

PARTS_KEPT: Final = 8  # records of prompts kept for one request
# nginx's status for a client that closed the connection before its answer
CLIENT_CLOSED_REQUEST = 499
PULL: Final = "pull"  # one leg follows the other, and the decode engine fetches the KV cache
SINGLE: Final = "single"  # one engine serves it
NO_END: Final = (b"", b"")  # of an answer whose end is not needed
_SHORT: Final = 128  # bytes; a shorter piece is kept together with the next one


class RequestOutcome(FastStrEnum):
    """How a request ended for its client."""

    OK = auto()
    CLIENT_ERROR = auto()  # 4xx
    SERVER_ERROR = auto()  # 5xx
    CLIENT_DISCONNECTED = auto()  # the client left first
    STREAM_ABORTED = auto()  # it failed after status 200


class MoveReason(FastStrEnum):
    """Why a stream leaves its engine."""

    DRAIN = auto()  # it is drained by moving its streams, or changes its role to prefill
    KV_ROOM = auto()  # its KV cache is full


class MoveOutcome(FastStrEnum):
    """The result of moving a stream from its engine."""

    MOVED = auto()  # another engine continues it, with its KV cache
    # the transfer failed: another engine, or the same, computed the prompt again
    RESUMED = auto()
    FAILED = auto()  # no engine could: the client got an error
    DISCONNECTED = auto()  # the client left meanwhile
    STAYED = auto()  # not tried: the continuation would not be exact


_NO_NAME: Final = RequestId("")
_OK: Final = RequestOutcome.OK


class LegRecord:
    """One leg at one engine; ``ms`` stays None until its answer begins or it fails."""

    __slots__ = ("expected", "instance", "ms", "name", "own_usage", "sent_at", "tokens")

    def __init__(self, instance: InstanceId, ms: float | None = None, sent_at: float = 0.0) -> None:
        self.instance = instance
        self.name = _NO_NAME  # of the request at this engine, after it was sent
        self.sent_at = sent_at  # by the router's clock
        self.ms = ms
        self.tokens: int | None = None  # of the prompt, counted by a prefill engine
        # of a decode leg: the expected time by which its engines were chosen, if they were
        self.expected: ExpectedTime | None = None
        # Of a decode leg: events, or an answer, with its engine's own usage, if the client got
        # another one.
        self.own_usage: bytes | None = None


class Retry:
    """A failed leg, after which the request was sent again. It is never changed."""

    __slots__ = ("leg", "reason", "role")

    def __init__(self, leg: LegRecord, reason: Failure, role: Role) -> None:
        self.leg = leg
        self.reason = reason
        self.role = role

    def __str__(self) -> str:
        return f"{self.leg.instance} {self.reason}"


class MoveRecord:
    """The cut of a stream, to continue it at another engine."""

    __slots__ = ("cut_at", "gap_s", "outcome", "prefill", "source")

    def __init__(self, source: InstanceId, cut_at: float) -> None:
        self.source = source
        self.prefill: LegRecord | None = None  # the prefill leg before it
        self.cut_at = cut_at  # by the router's clock
        self.gap_s: float | None = None  # from the cut to the next event
        self.outcome: MoveOutcome | None = None  # None: under way

    def __str__(self) -> str:
        gap = "" if self.gap_s is None else f" after {written_ms(self.gap_s * 1000)} ms"
        return f"{self.source} {self.outcome or 'cut'}{gap}"


class RequestRecord:
    """The record of one request. Times are seconds; None: it did not come to that."""

    __slots__ = (
        "admitted_s",
        "answered",
        "began_at",
        "cache_missed_at",
        "cached",
        "client_id",
        "decode",
        "duration_s",
        "end",
        "error",
        "last_token_at",
        "moves",
        "parts",
        "past",
        "path",
        "prefill",
        "prefill_error",
        "push",
        "queue_s",
        "received_s",
        "relayed",
        "request_id",
        "retries",
        "single_reason",
        "status",
        "transfer",
        "ttft_s",
    )

    def __init__(
        self,
        request_id: RequestId,
        path: str = "",
        client_id: str | None = None,
        *,
        single_reason: SingleEngineReason | None = None,
        push: LegOrder | None = None,
        prefill: LegRecord | None = None,
        decode: LegRecord | None = None,
        error: str | None = None,
    ) -> None:
        self.began_at = 0.0  # when its head came, by the router's clock
        # until its whole body had come, if not at once
        self.received_s: float | None = None
        self.queue_s: float | None = None  # in the queue of the admission control
        self.admitted_s: float | None = None  # until it had its place
        self.ttft_s: float | None = None  # until the first event of a stream was written
        # when the latest piece of a stream came from a leg that is over
        self.last_token_at: float | None = None
        self.duration_s = 0.0  # of the whole request, once it is over
        self.request_id = request_id
        self.path = path
        # the client's id of the request: for the client and the log, never for an engine
        self.client_id = client_id
        self.single_reason = single_reason  # why one engine serves it
        self.push = push
        # the transfer's id at engines that push: for the log, never for a client
        self.transfer: TransferId | None = None
        self.prefill = prefill
        self.decode = decode
        self.retries: tuple[Retry, ...] = ()
        self.moves: tuple[MoveRecord, ...] = ()
        self.past: tuple[tuple[LegRecord, Role], ...] = ()  # good legs of tries that failed
        self.status = 0  # once it is over
        self.answered = False  # the client has the whole answer; only cleaning up is left
        self.error = error  # the failure, for the log
        # of a request with several prompts, once one of them is over
        self.parts: PromptParts | None = None
        # a failure of the prefill leg after the answer had begun
        self.prefill_error: str | None = None
        # a decode engine that had cached far less than expected
        self.cache_missed_at: InstanceId | None = None
        # bytes of the prompt that the decode engine had cached, and of the whole prompt
        self.cached: tuple[int, int] | None = None
        self.relayed = 0  # bytes of the answer, if counted
        self.end = NO_END  # the last pieces of the answer's body, if needed

    def over(self, status: int, duration_s: float) -> None:
        """Note how the request ended."""
        self.status = status
        self.duration_s = duration_s

    @property
    def outcome(self) -> RequestOutcome:
        """How the request ended, once it is over."""
        status = self.status
        if status < 400:
            return _OK if self.error is None else RequestOutcome.STREAM_ABORTED
        if status == CLIENT_CLOSED_REQUEST:
            return RequestOutcome.CLIENT_DISCONNECTED
        return RequestOutcome.SERVER_ERROR if status >= 500 else RequestOutcome.CLIENT_ERROR

    @property
    def mode(self) -> str:
        """The way of the KV cache: pull, push, push_cold, single or each_prompt."""
        if self.single_reason is not None:
            return SINGLE
        return PULL if self.push is None else self.push

    def is_usual(self) -> bool:
        """Return whether only its engines and times are worth logging."""
        return not (
            self.error
            or self.single_reason
            or self.push
            or self.retries
            or self.client_id
            or self.prefill_error
            or self.moves
        )

    def id_headers(self) -> dict[str, str]:
        """Return the headers with the request's ids: the client's, if it has one, and ours."""
        if self.client_id is None:
            return {"x-request-id": self.request_id}
        return {"x-request-id": self.client_id, "x-pdrelay-request-id": self.request_id}

    def id_lines(self) -> str:
        """Return the same as lines of a head."""
        if self.client_id is None:
            return f"x-request-id: {self.request_id}\r\n"
        return "".join([f"{name}: {value}\r\n" for name, value in self.id_headers().items()])

    @property
    def attempt_id(self) -> RequestId:
        """The id for both engines if the request is sent now: the router's, with a suffix after
        retries and moves.
        """
        again = len(self.retries) + len(self.moves)
        return RequestId(f"{self.request_id}-r{again}") if again else self.request_id

    def wrote(self, piece: bytes) -> None:
        """Keep the end of the answer, where its usage is, and count its bytes.

        Behind the usage come short pieces: marks of the end, comments, or an event's empty line
        alone.
        """
        self.relayed += len(piece)
        before, last = self.end
        self.end = (last, piece) if len(last) >= _SHORT else (before, last + piece)

    def pop_end(self) -> bytes:
        """Return the end of the answer, once."""
        end = self.end
        self.end = NO_END
        return b"".join(end)

    def set_aside(self, role: Role, reason: Failure) -> None:
        """Record a retry for the leg that failed."""
        leg = self.prefill if role is Role.PREFILL else self.decode
        if leg is not None:
            self.retries = (*self.retries, Retry(leg, reason, role))

    def start_over(self) -> None:
        """Record the rest of a failed try."""
        failed = [retry.leg for retry in self.retries]
        for leg, role in ((self.prefill, Role.PREFILL), (self.decode, Role.DECODE)):
            if leg is not None and leg not in failed:
                self.past = (*self.past, (leg, role))
        self.push = self.transfer = self.prefill = self.decode = self.cached = None

    def move_on(self, move: MoveRecord) -> None:
        """Record the cut of the stream, and put its legs aside."""
        move.prefill = self.prefill
        self.start_over()
        self.single_reason = None
        self.moves = (*self.moves, move)


class PromptRecord(RequestRecord):
    """The record of one of several prompts; the request that has them is counted in their place."""

    __slots__ = ()


class PromptParts:
    """The prompts of one request: how many are over, and the records of the most notable ones.

    Those that failed and, of the others, those that took longest: a request may have thousands.
    """

    __slots__ = ("count", "failed", "notable")

    def __init__(self) -> None:
        self.count = 0
        self.failed = 0
        self.notable: list[PromptRecord] = []  # the most notable first

    def add(self, record: PromptRecord) -> None:
        """Add the record of a prompt that is over."""
        self.count += 1
        self.failed += _has_failed(record)
        self.notable.append(record)
        if len(self.notable) > PARTS_KEPT:
            self.notable.sort(key=_notability, reverse=True)
            self.notable.pop()


def _has_failed(record: RequestRecord) -> bool:
    return record.error is not None or record.status >= 400


def _notability(record: RequestRecord) -> tuple[bool, float]:
    return _has_failed(record), record.duration_s
