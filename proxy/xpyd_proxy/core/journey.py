"""Where one request went, and how long each leg took."""

from dataclasses import dataclass, field

from xpyd_proxy.core.model import InstanceId, Push, RequestId, Role, Solo


@dataclass(slots=True)
class Visit:
    """A stay at one engine; ``ms`` stays None until its answer begins or it fails."""

    instance: InstanceId
    ms: float | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """A stay that ended badly, so that the request was sent again."""

    visit: Visit
    reason: str

    def __str__(self) -> str:
        return f"{self.visit.instance} {self.reason}"


@dataclass(slots=True)
class Journey:
    """Filled in as the request travels; the source of the response headers and of the log line."""

    request_id: RequestId
    solo: Solo | None = None
    push: Push | None = None
    prefill: Visit | None = None
    decode: Visit | None = None
    retries: list[Retry] = field(default_factory=list[Retry])
    answered: bool = False  # all of it is with the client; what still happens is tidying up
    fault: str | None = None  # what went wrong, for the log
    late: str | None = None  # what went wrong with the prefill leg after the answer had begun, for the log

    @property
    def attempt_id(self) -> RequestId:
        """The id for both engines if the request is sent now: ours, and with every retry another."""
        return RequestId(f"{self.request_id}-r{len(self.retries)}") if self.retries else self.request_id

    @property
    def route(self) -> str | None:
        """What is unusual about the way of the request; None: one leg followed the other."""
        return f"solo: {self.solo}" if self.solo else self.push

    def set_aside(self, role: Role, reason: str) -> None:
        """Put the visit that failed among the retries: its leg goes out once more."""
        visit = self.prefill if role is Role.PREFILL else self.decode
        if visit is not None:
            self.retries.append(Retry(visit, reason))

    def start_over(self) -> None:
        """Forget the rest of a try that failed."""
        self.push = self.prefill = self.decode = None

    def server_timing(self) -> str:
        """Return the value of the Server-Timing header; durations are milliseconds."""
        entries = [_entry("retry", str(retry), retry.visit.ms) for retry in self.retries]
        if self.route:
            entries.append(_entry("route", self.route, None))
        for name, visit in (("prefill", self.prefill), ("decode", self.decode)):
            if visit is not None:
                entries.append(_entry(name, visit.instance, visit.ms))
        return ", ".join(entries)


def _entry(name: str, description: str, ms: float | None) -> str:
    return f'{name};desc="{description}"' + ("" if ms is None else f";dur={ms:.1f}")
