"""Where one request went, and how long each leg took."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from xpyd_proxy.core.fast_enum import Word
from xpyd_proxy.core.model import InstanceId, Push, RequestId, Role, Solo, TransferId

_CLIENT_ID: Final = re.compile(rb"[!-~]{1,128}")
HUNG_UP = 499  # nginx's status for a client that closed the connection before it was answered


@dataclass(slots=True, init=False)
class Visit:
    """A stay at one engine; ``ms`` stays None until its answer begins or it fails."""

    instance: InstanceId
    ms: float | None

    def __init__(self, instance: InstanceId, ms: float | None = None) -> None:
        self.instance = instance
        self.ms = ms


@dataclass(frozen=True, slots=True)
class Retry:
    """A stay that ended badly, so that the request was sent again."""

    visit: Visit
    reason: str
    role: Role

    def __str__(self) -> str:
        return f"{self.visit.instance} {self.reason}"


@dataclass(slots=True, init=False)
class Journey:
    """Filled in as the request travels; the source of the response headers and of the log line."""

    request_id: RequestId
    client_id: str | None  # what the client calls the request: for the client and the log, never for an engine
    solo: Solo | None
    push: Push | None
    transfer: TransferId | None  # what engines that push call it: for the log, never for a client
    prefill: Visit | None
    decode: Visit | None
    retries: list[Retry]
    answered: bool  # all of it is with the client; what still happens is tidying up
    fault: str | None  # what went wrong, for the log
    late: str | None  # what went wrong with the prefill leg after the answer had begun, for the log
    before: bytes  # the last but one piece of the answer's body
    last: bytes

    def __init__(
        self,
        request_id: RequestId,
        *,
        client_id: str | None = None,
        solo: Solo | None = None,
        push: Push | None = None,
        prefill: Visit | None = None,
        decode: Visit | None = None,
        retries: list[Retry] | None = None,
        fault: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.client_id = client_id
        self.solo = solo
        self.push = push
        self.prefill = prefill
        self.decode = decode
        self.retries = [] if retries is None else retries
        self.fault = fault
        self.late = None
        self.transfer = None
        self.answered = False
        self.before = self.last = b""

    def id_headers(self) -> dict[str, str]:
        """Return the headers that name the request: by the client's own id, if it has one, and then by ours too."""
        if self.client_id is None:
            return {"x-request-id": self.request_id}
        return {"x-request-id": self.client_id, "x-xpyd-request-id": self.request_id}

    def id_lines(self) -> str:
        """Return the same as lines of a head."""
        if self.client_id is None:
            return f"x-request-id: {self.request_id}\r\n"
        return "".join([f"{name}: {value}\r\n" for name, value in self.id_headers().items()])

    @property
    def attempt_id(self) -> RequestId:
        """The id for both engines if the request is sent now: ours, and with every retry another."""
        return RequestId(f"{self.request_id}-r{len(self.retries)}") if self.retries else self.request_id

    @property
    def route(self) -> str | None:
        """What is unusual about the way of the request; None: one leg followed the other."""
        return f"solo: {self.solo}" if self.solo else self.push

    @property
    def is_usual(self) -> bool:
        """Tell whether there is nothing to say about it but where it went."""
        return not (self.client_id or self.solo or self.push or self.retries or self.late or self.fault)

    def says(self, piece: bytes) -> None:
        """Remember the end of the answer, for core/protocol/kv_transfer_check.py."""
        self.before, self.last = self.last, piece

    def set_aside(self, role: Role, reason: str) -> None:
        """Put the visit that failed among the retries: its leg goes out once more."""
        visit = self.prefill if role is Role.PREFILL else self.decode
        if visit is not None:
            self.retries.append(Retry(visit, reason, role))

    def start_over(self) -> None:
        """Forget the rest of a try that failed."""
        self.push = self.transfer = self.prefill = self.decode = None

    def server_timing(self) -> str:
        """Return the value of the Server-Timing header; durations are milliseconds."""
        entries = [_entry("retry", str(retry), retry.visit.ms) for retry in self.retries]
        if route := self.route:
            entries.append(_entry("route", route, None))
        for name, visit in (("prefill", self.prefill), ("decode", self.decode)):
            if visit is not None:
                entries.append(_entry(name, visit.instance, visit.ms))
        return ", ".join(entries)


class Ending(Word):
    """How a request ended, as far as its client can tell."""

    OK = "2xx"
    FAULTY = "faulty"  # its status was good, and then something went wrong: the stream broke off, for example
    CLIENT = "4xx"
    SERVER = "5xx"
    HUNG_UP = "hung_up"  # the client left first


@dataclass(slots=True, init=False)
class Outcome:
    """What became of a request. It does not change."""

    path: str
    status: int
    seconds: float
    first_s: float | None  # until a stream began; None: the answer was no stream, or an error
    said: bytes  # the end of the answer, or all of it

    def __init__(self, path: str, status: int, seconds: float, first_s: float | None = None, said: bytes = b"") -> None:
        self.path = path
        self.status = status
        self.seconds = seconds
        self.first_s = first_s
        self.said = said

    def ending(self, journey: Journey) -> Ending:
        """Say how it ended."""
        if self.status == HUNG_UP:
            return Ending.HUNG_UP
        if self.status >= 500:
            return Ending.SERVER
        if self.status >= 400:
            return Ending.CLIENT
        return Ending.FAULTY if journey.fault else Ending.OK


def client_id(header: bytes) -> str | None:
    """Return the id in a client's X-Request-Id; None if it is too long or odd to be repeated in headers and logs."""
    return header.decode("ascii") if _CLIENT_ID.fullmatch(header) else None


def facts(journey: Journey, outcome: Outcome) -> Mapping[str, object]:
    """Return what one line of the log says about a request: ids and our own words, no address and nothing private."""
    always: dict[str, object] = {
        "id": journey.request_id,
        "path": outcome.path,
        "prefill": journey.prefill and journey.prefill.instance,
        "decode": journey.decode and journey.decode.instance,
        "status": outcome.status,
        "ms": tenths(outcome.seconds * 1000) / 10,
    }
    if journey.is_usual:
        return always
    notes = (
        ("client_id", journey.client_id),
        ("solo", journey.solo and str(journey.solo)),
        ("route", journey.push and str(journey.push)),
        ("transfer", journey.transfer),
        ("retries", ", ".join(map(str, journey.retries)) if journey.retries else ""),
        ("late", journey.late),
        ("fault", journey.fault),
    )
    always.update({name: note for name, note in notes if note})
    return always


def tenths(ms: float) -> int:
    """Return a time in tenths of a millisecond: writing an integer takes a fraction of writing a float."""
    return int(ms * 10 + 0.5)


def _entry(name: str, description: str, ms: float | None) -> str:
    if ms is None:
        return f'{name};desc="{description}"'
    dur = tenths(ms)
    return f'{name};desc="{description}";dur={dur // 10}.{dur % 10}'
