"""Records events of requests on the engine thread, if there is a route to read timelines."""

import time
from collections.abc import Callable, Container, Iterable
from typing import TypeAlias

from vllm import envs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from pdrelay_connector.core.counters import Counters, StatsReport
from pdrelay_connector.core.ids import RequestId
from pdrelay_connector.core.lease.lease_table import LeaseEvent
from pdrelay_connector.core.timeline import TimelineStep, shifted

# The only clock that two engines share; signatures of kv_transfer_params allow for its error.
Clock: TypeAlias = Callable[[], float]  # s since the epoch
WALL_CLOCK: Clock = time.time  # noqa: TID251
PLUGIN = "pdrelay_timelines"  # vLLM's entry point (shell/timelines.py)
MAX_REQUESTS = 4096  # whose first token has not come; those beyond are not noted
_LEASE = {
    LeaseEvent.DONE: TimelineStep.LEASE_DONE,
    LeaseEvent.DROPPED: TimelineStep.LEASE_DROPPED,
    LeaseEvent.PEER_LOST: TimelineStep.LEASE_PEER_LOST,
    LeaseEvent.EXPIRED: TimelineStep.LEASE_EXPIRED,
    LeaseEvent.REVOKED: TimelineStep.LEASE_REVOKED,
}


def are_wanted() -> bool:
    """Whether the API server has the route of timelines: ``VLLM_PLUGINS`` names its plugin."""
    return PLUGIN in (envs.VLLM_PLUGINS or ())


def dated(
    report: StatsReport, clock: Callable[[], float], wall_clock: Callable[[], float]
) -> StatsReport:
    """Convert the times of a report's events from ``clock`` (monotonic) to the epoch."""
    if report.events:
        report.events = shifted(report.events, wall_clock() - clock())
    return report


class TimelineNotes:
    """vLLM's scheduler hooks, as far as a request's timeline shows them."""

    def __init__(
        self, counters: Counters, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._counters = counters
        self._clock = clock
        self._wall_clock = wall_clock
        self._unconsidered: set[str] = set()
        self._meeting: set[str] = set()  # wait for the first handshake with their peer
        self._comparing: set[str] = set()  # the workers compare what was pushed with P's checksums
        self._computing: dict[str, Request] = {}  # without a token yet

    def began(self, request: Request) -> None:
        """The scheduler knows a request."""
        if not self._counters.keeps_events or len(self._computing) >= MAX_REQUESTS:
            return
        name = request.request_id
        now = self._clock()
        arrived = request.arrival_time - (self._wall_clock() - now)
        self._unconsidered.add(name)
        self._computing[name] = request
        self._counters.note(name, TimelineStep.ARRIVED, min(now, arrived))
        self._counters.note(name, TimelineStep.QUEUED, now)

    def considered(self, request: Request, cached: int) -> None:
        """VLLM considers the request, with so many tokens in the prefix cache."""
        if request.request_id in self._unconsidered:
            self._unconsidered.discard(request.request_id)
            self._counters.note(request.request_id, TimelineStep.CONSIDERED, self._clock(), cached)

    def meeting(self, request: Request, *, lasts: bool) -> None:
        """Whether it waits for its peer's first handshake; vLLM allocates no blocks before."""
        name = request.request_id
        if lasts and name in self._computing:
            self._meeting.add(name)
        elif not lasts and name in self._meeting:
            self._meeting.discard(name)
            self._counters.note(name, TimelineStep.PEER_MET, self._clock())

    def load_ordered(self, request: Request, tokens: int) -> None:
        """The KV of so many tokens will be loaded into its blocks."""
        if tokens and request.request_id in self._computing:
            self._counters.note(
                request.request_id, TimelineStep.LOAD_ORDERED, self._clock(), tokens
            )

    def step(self, output: SchedulerOutput) -> None:
        """A step is about to begin."""
        if not self._computing:
            return
        now = self._clock()
        for name in [
            name for name, request in self._computing.items() if request.num_output_tokens
        ]:
            self._counters.note(name, TimelineStep.FIRST_TOKEN, now)
            del self._computing[name]
        for name in self._computing.keys() & output.num_scheduled_tokens.keys():
            self._counters.note(
                name, TimelineStep.COMPUTING, now, output.num_scheduled_tokens[name]
            )

    def load_ended(self, request: str, *, has_failed: bool, is_compared: bool = False) -> None:
        """A push has ended; if it ``is_compared``, the workers decide how."""
        if request not in self._computing:
            return
        if is_compared:
            self._comparing.add(request)
        else:
            self._counters.note(
                request,
                TimelineStep.LOAD_FAILED if has_failed else TimelineStep.LOADED,
                self._clock(),
            )

    def load_skipped(self, request: str, cause: str) -> None:
        """Nothing is loaded for a request, which computes its own prompt."""
        if request in self._computing:
            self._counters.note(request, TimelineStep.LOAD_FAILED, self._clock(), note=cause)

    def loads_reported(self, requests: Iterable[str], failed: Container[str] = ()) -> None:
        """The workers have reported the end of these requests' loads to vLLM."""
        for request in self._comparing.intersection(requests) if self._comparing else ():
            self._comparing.discard(request)
            self.load_ended(request, has_failed=request in failed)

    def finished(self, request: Request) -> None:
        """It is over."""
        if not self._counters.keeps_events:
            return
        name = request.request_id
        now = self._clock()
        self._unconsidered.discard(name)
        self._meeting.discard(name)
        self._comparing.discard(name)
        if self._computing.pop(name, None) is not None and request.num_output_tokens:
            self._counters.note(name, TimelineStep.FIRST_TOKEN, now)
        self._counters.note(name, TimelineStep.FINISHED, now, request.num_output_tokens)

    def lease_ended(self, name: RequestId, reason: LeaseEvent) -> None:
        """They are not any more."""
        if self._counters.keeps_events:
            self._counters.note(name, _LEASE[reason], self._clock())
