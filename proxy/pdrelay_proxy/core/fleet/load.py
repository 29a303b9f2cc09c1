"""How busy one engine is: the requests it has from us, and what it says of itself.

vLLM reports its load with every prefill answer (``endpoint-load-metrics``, the ORCA format) if the
request asks for it.
"""

from dataclasses import dataclass, field
from typing import Final

from pdrelay_proxy.core.model import RequestId
from pdrelay_proxy.core.raw_json import maybe
from pdrelay_proxy.core.schemas import NamedMetrics, OrcaReport

ASK_FOR_REPORT: Final = (b"endpoint-load-metrics-format", b"JSON")
_PREFIX: Final = b"JSON "
_MOST_BYTES: Final = 4096
# seconds for which what an engine showed of its KV cache is told: metrics are read every 15
_KV_S: Final = 60.0


@dataclass(slots=True)
class Load:
    """The load of one engine. Times are seconds of a clock that only rises."""

    fresh_s: float = 5.0  # for so long a report counts
    report: NamedMetrics | None = None
    at_other_routers: int = 0  # requests it has from the fleet's other routers, as they say
    _reported: float = 0.0
    _kv: tuple[float, float] | None = None  # when it showed what share of its KV cache is in use
    _requests: dict[RequestId, int] = field(default_factory=dict[RequestId, int])

    @property
    def in_flight(self) -> int:
        """How many requests it has from this router, or has a slot reserved for."""
        return len(self._requests)

    def enter(self, request: RequestId) -> None:
        """Count a request, once however often it enters."""
        self._requests[request] = self._requests.get(request, 0) + 1

    def leave(self, request: RequestId) -> bool:
        """Stop to count it when it has left as often as it entered; tell whether it has."""
        left = self._requests.pop(request, 1) - 1
        if left:
            self._requests[request] = left
        return not left

    def reported(self, report: NamedMetrics, *, now: float) -> None:
        """Take in what the engine said."""
        self.report = report
        self._reported = now
        self.kv_shown(report.kv_cache_usage_perc, now=now)

    def kv_shown(self, share: float, *, now: float) -> None:
        """Take in which share of its KV cache is in use, from 0 to 1."""
        self._kv = now, share

    def kv_usage(self, *, now: float) -> float | None:
        """Return the share that it showed last; None: it showed none lately."""
        return None if self._kv is None or now > self._kv[0] + _KV_S else self._kv[1]

    def waiting(self, *, now: float) -> int:
        """Return how many requests the engine says are in its queue, whoever has sent them; 0 if it
        does not say.
        """
        if self.report is None or now > self._reported + self.fresh_s:
            return 0
        return int(self.report.num_requests_waiting)

    def score(self, now: float) -> float:
        """Return a number that is higher the busier it is.

        Requests of other routers are those that they tell of. Without that its own queue is added
        to our requests, which holds those of other routers too: several seconds old, if there are
        many routers. The use of its cache, below 1, decides between equals.
        """
        report = self.report
        in_flight = len(self._requests) + self.at_other_routers  # not the property, which is a call
        if report is None or now > self._reported + self.fresh_s:
            return float(in_flight)
        return in_flight + report.num_requests_waiting + min(report.kv_cache_usage_perc, 0.999)


def read_report(header: bytes) -> NamedMetrics | None:
    """Read the value of an ``endpoint-load-metrics`` header; None: it is another one."""
    if len(header) > _MOST_BYTES or not header.startswith(_PREFIX):
        return None
    report = maybe(header[len(_PREFIX) :], OrcaReport)
    return None if report is None else report.named_metrics
