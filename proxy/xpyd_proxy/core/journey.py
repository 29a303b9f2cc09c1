"""Where one request went, and how long each leg took."""

from dataclasses import dataclass

from xpyd_proxy.core.model import InstanceId, RequestId, Solo


@dataclass(slots=True)
class Visit:
    """A stay at one engine; ``ms`` stays None until its answer begins or it fails."""

    instance: InstanceId
    ms: float | None = None


@dataclass(slots=True)
class Journey:
    """Filled in as the request travels; the source of the response headers and of the log line."""

    request_id: RequestId
    solo: Solo | None = None
    prefill: Visit | None = None
    decode: Visit | None = None
    fault: str | None = None  # what went wrong, for the log

    def server_timing(self) -> str:
        """Return the value of the Server-Timing header; durations are milliseconds."""
        entries = [f'route;desc="solo: {self.solo}"'] if self.solo else []
        for name, visit in (("prefill", self.prefill), ("decode", self.decode)):
            if visit is not None:
                took = "" if visit.ms is None else f";dur={visit.ms:.1f}"
                entries.append(f'{name};desc="{visit.instance}"{took}')
        return ", ".join(entries)
