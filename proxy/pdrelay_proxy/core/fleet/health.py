"""The life of one engine: which requests it may get, and what is held against it.

Evidence comes from requests (``succeeded``, ``failed``) and from probes (``seen``, ``missed``);
either is enough. An engine is good until proven otherwise; one that misses its first probe is not
up yet, and gets requests once it answers. A broken one rests, longer after every break, and then
gets one request: its trial; while it misses probes it gets none. Only what
core/protocol/fault_table.py holds against the engine counts: a refused request (4xx), or one it is
too busy for, says that it lives. An answer of 5xx, or one that breaks off, counts as soon as
another engine has answered the same request well (``blamed``), and not before: there are requests
that make any engine fail, and a client that sends a few of them must not take one engine after the
other away from everybody else. For the same reason no request ejects an engine that answers its
probes and is needed (``is_needed``); one that cannot be reached is away, whoever asks.

The first event of a stream says nothing of its end. Answers that break off behind their beginning
(``broke_off``) are counted by themselves, until one has come to its end (``completed``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Final

from pdrelay_proxy.core.fleet.failure_window import FailureRatio, FailureWindow
from pdrelay_proxy.core.model import RequestId
from pdrelay_proxy.core.protocol.fault_table import VERDICTS, Failure, Held
from pdrelay_proxy.settings import Settings

_RATIO: Final = FailureRatio()
_MAX_REST_S: Final = 60.0  # of an ejected engine, however often its trials fail
_CLAIM_S: Final = 30.0  # that a trial may take to begin before another request may be the trial
# What is held against it, said of the request.
_SAID: Final[Mapping[Failure, str]] = {
    Failure.UNREACHABLE: "did not reach it",
    Failure.BAD_RESPONSE: "got no good answer",
    Failure.TIMEOUT: "timed out",
    Failure.HTTP_5XX: "was answered with an error",
}


class HealthState(StrEnum):
    """Where an engine is in its life."""

    # it has never answered: it gets requests as long as it has not missed a probe either
    STARTING = auto()
    HEALTHY = auto()
    EJECTED = auto()  # gets nothing until it has rested
    HALF_OPEN = auto()  # gets one request at a time, until one of them succeeds
    DRAINING = auto()  # gets nothing new; what it has goes on
    DRAINED = auto()  # has nothing left, and may be stopped
    GONE = auto()


WELL: Final = frozenset({HealthState.STARTING, HealthState.HEALTHY})
LEAVING: Final = frozenset({HealthState.DRAINING, HealthState.DRAINED})
# it may get requests
SERVING: Final = frozenset({HealthState.STARTING, HealthState.HEALTHY, HealthState.HALF_OPEN})


class HealthEvent(StrEnum):
    """What happens to an engine."""

    PROVEN = auto()  # it answered a request, or a probe
    BACK = auto()  # it answers probes again after it did not
    TRIPPED = auto()  # too much is held against it
    RESTED = auto()
    DRAIN = auto()
    EMPTY = auto()
    UNDRAIN = auto()
    REMOVE = auto()


_JUDGED_BY: Final = {
    HealthEvent.PROVEN: HealthState.HEALTHY,
    HealthEvent.BACK: HealthState.HEALTHY,
    HealthEvent.TRIPPED: HealthState.EJECTED,
    HealthEvent.DRAIN: HealthState.DRAINING,
    HealthEvent.REMOVE: HealthState.GONE,
}
_LEAVES_BY: Final = {
    HealthEvent.EMPTY: HealthState.DRAINED,
    HealthEvent.UNDRAIN: HealthState.STARTING,
    HealthEvent.REMOVE: HealthState.GONE,
}
TRANSITIONS: Final[Mapping[HealthState, Mapping[HealthEvent, HealthState]]] = {
    HealthState.STARTING: {**_JUDGED_BY, HealthEvent.UNDRAIN: HealthState.STARTING},
    HealthState.HEALTHY: {**_JUDGED_BY, HealthEvent.UNDRAIN: HealthState.HEALTHY},
    HealthState.EJECTED: {
        **_JUDGED_BY,  # BACK: it was restarted
        # an answer to a request of before, or a probe that never failed
        HealthEvent.PROVEN: HealthState.EJECTED,
        HealthEvent.RESTED: HealthState.HALF_OPEN,
        HealthEvent.UNDRAIN: HealthState.EJECTED,
    },
    HealthState.HALF_OPEN: {**_JUDGED_BY, HealthEvent.UNDRAIN: HealthState.HALF_OPEN},
    HealthState.DRAINING: {**_LEAVES_BY, HealthEvent.DRAIN: HealthState.DRAINING},
    HealthState.DRAINED: {**_LEAVES_BY, HealthEvent.DRAIN: HealthState.DRAINED},
    HealthState.GONE: {},
}
_STARTING: Final = HealthState.STARTING
_HEALTHY: Final = HealthState.HEALTHY
_EJECTED: Final = HealthState.EJECTED
_HALF_OPEN: Final = HealthState.HALF_OPEN
# The others get no requests.
_JUDGED: Final = frozenset(
    {HealthState.STARTING, HealthState.HEALTHY, HealthState.EJECTED, HealthState.HALF_OPEN}
)


@dataclass(slots=True)
class ChangeCount:
    """Counts what may change the choice of engines; whoever remembers a choice compares."""

    count: int = 0


@dataclass(slots=True)
class _Trial:
    """The one request that a broken engine gets; whose it is shows when it begins."""

    until: float
    request: RequestId | None = None


@dataclass(slots=True)
class EngineHealth:
    """What is known of the health of one engine. Times are seconds of a clock that only rises."""

    since: float  # when it came into its state
    settings: Settings = field(default_factory=Settings)
    ratio: FailureRatio = _RATIO
    max_rest_s: float = _MAX_REST_S
    state: HealthState = HealthState.STARTING
    why: str = "added"  # what brought it there, in words
    changes: ChangeCount = field(default_factory=ChangeCount)
    served_at: float = -math.inf  # when it last answered a request
    # too few others of its role would be left without it
    is_needed: Callable[[], bool] | None = None
    # from when on it may have in its prefix cache what it was sent
    cache_since: float = field(init=False)
    _in_a_row: int = 0  # requests that have failed since it last began a good answer
    _broken_in_a_row: int = 0  # answers that have broken off since one came to its end
    misses: int = 0  # probes, in a row
    _was_spared: bool = False
    _is_probed: bool = False  # it has answered the last probe
    # when the first probe was missed of those since it answered one, if badly
    _silent_since: float | None = None
    _rest_s: float = 0.0  # of its present break
    trial: _Trial | None = None  # that is to show whether it is well again
    _window: FailureWindow = field(init=False)

    def __post_init__(self) -> None:
        self._window = FailureWindow(self.ratio.window_s)
        self.cache_since = self.since

    @property
    def is_well(self) -> bool:
        """Whether it is healthy, and no request has failed since it last answered one."""
        return self.state is _HEALTHY and not self._has_failed

    @property
    def _has_failed(self) -> bool:
        """Tell whether something is held against it that no good answer has made up for."""
        return self._in_a_row > 0 or self._broken_in_a_row > 0

    @property
    def is_away(self) -> bool:
        """Tell whether it is waited for: a probe finds it sooner than a request."""
        return self.state is _EJECTED or (self.state is _STARTING and self.misses > 0)

    @property
    def _rested_at(self) -> float:
        """When a broken engine has rested; infinity: it misses probes, and has to answer one."""
        misses_probes = self.misses >= self.settings.health_check_failures
        return math.inf if misses_probes else self.since + self._rest_s

    @property
    def steady_until(self) -> float:
        """When the passing of time may change whether it may serve; infinity: only what ``changes``
        counts does.
        """
        if self.state is _EJECTED:
            return self._rested_at
        if self.state is _HALF_OPEN and self.trial is not None and self.trial.request is None:
            return self.trial.until
        return math.inf

    def serves_in_s(self, *, now: float) -> float | None:
        """Return after how many seconds it may serve again, as far as that can be told; None: it
        cannot.

        A broken engine has its rest, one that misses probes is waited for until the next one, and a
        trial takes a moment. What is drained comes back when an operator says so.
        """
        if self.state is _EJECTED and (rested_at := self._rested_at) < math.inf:
            return rested_at - now
        if self.is_away and self.settings.health_check_interval_s > 0:
            return self.settings.health_check_interval_s
        return 0.0 if self.state is _HALF_OPEN else None

    def may_serve(self, *, now: float) -> bool:
        """Tell whether it may get a request; one that has rested is tried from now on."""
        if self.state is _EJECTED and now >= self._rested_at:
            self._step(HealthEvent.RESTED, "has rested, and gets one request at a time", now)
        if self.state is _HALF_OPEN:
            if self.trial is not None and self.trial.request is None and now >= self.trial.until:
                self.trial = None
                self.changes.count += 1
            return self.trial is None
        return self.state is _HEALTHY or (self.state is _STARTING and not self.is_away)

    def chosen(self, *, now: float) -> None:
        """It was chosen for a request: if it is to be tried, that is its trial."""
        if self.state is _HALF_OPEN:
            self.trial = _Trial(until=now + _CLAIM_S)
            self.changes.count += 1

    def claimed(self, request: RequestId) -> None:
        """A request is here; the first one to come to an engine that is tried is its trial."""
        if self.state is _HALF_OPEN and (self.trial is None or self.trial.request is None):
            self.trial = _Trial(self.since, request)
            self.changes.count += 1

    def released(self, request: RequestId) -> None:
        """A request is over; if it was the trial and proved nothing, the next one may be it."""
        if self.trial is not None and self.trial.request == request:
            self.trial = None
            self.changes.count += 1

    def succeeded(self, requests: Sequence[RequestId], now: float) -> None:
        """It has answered some requests, one or more."""
        self._window.count(failed=False, now=now, legs=len(requests))
        self._in_a_row = 0
        self.served_at = now
        if self.state is not _HEALTHY:
            for request in requests:
                self._alive(request, now)

    def completed(self) -> None:
        """An answer has come to its end."""
        if self._broken_in_a_row:
            self._broken_in_a_row = 0
            if self.state is _HEALTHY:
                self._rest_s = 0.0

    def failed(
        self, request: RequestId, failure: Failure, *, now: float, was_begun: bool = False
    ) -> None:
        """A leg failed.

        What is not held against it (4xx, busy) shows that it is alive, and counts nothing.

        ``was_begun``: behind the first event of a stream, which was counted as a good answer.
        """
        verdict = VERDICTS[failure]
        if verdict.loses_cache:
            self.cache_since = now
            self.changes.count += 1
        if self.state not in _JUDGED:
            return
        if verdict.held is Held.NEVER:
            if verdict.proves_life:
                self._alive(request, now)
            return
        is_trial = self.state is _HALF_OPEN and self._is_trial(request)
        if verdict.held is Held.AT_ONCE:
            self._hold(failure, now, is_trial=is_trial, is_break=was_begun, was_counted=was_begun)
        elif is_trial and not self._is_spared():
            # it has proved nothing: the next trial comes after a rest
            self.trial = _Trial(until=now + self.settings.ejection_time_s)
            self.changes.count += 1

    def blamed(self, failure: Failure, *, now: float) -> None:
        """What it has failed was a good request: another engine has answered it."""
        if self.state in _JUDGED:
            self._hold(failure, now, is_trial=self.state is _HALF_OPEN)

    def broke_off(self, failure: Failure, *, was_begun: bool, now: float) -> None:
        """Its answer broke off, and that is its own fault; ``was_begun``: a stream, counted as a
        good answer before.
        """
        if self.state in _JUDGED:
            self._hold(failure, now, is_trial=False, is_break=True, was_counted=was_begun)

    def _hold(
        self,
        failure: Failure,
        now: float,
        *,
        is_trial: bool,
        is_break: bool = False,
        was_counted: bool = False,
    ) -> None:
        """Hold a failure against it, and break it if that is enough."""
        self._window.count(failed=True, now=now, is_new=not was_counted)
        if is_break:
            self._broken_in_a_row += 1
        else:
            self._in_a_row += 1
        is_spared = VERDICTS[failure].is_spared and self._is_spared()
        if is_trial and not is_spared:
            self._break(f"the request it was tried with {_SAID[failure]}", now)
        elif (
            self.state in (_STARTING, _HEALTHY)
            and (reason := self._verdict(failure, now)) is not None
        ):
            if is_spared:
                self._was_spared = True
                self.why = (
                    f"answers its probes, but a request {_SAID[failure]}: it stays, for too few "
                    f"others are left"
                )
            else:
                self._break(reason, now)

    def _is_spared(self) -> bool:
        """Tell whether requests alone do not break it now."""
        return self._is_probed and self.is_needed is not None and self.is_needed()

    def seen(self, *, now: float) -> None:
        """It has answered a probe."""
        self.heard()
        self._is_probed = True
        if self._was_spared and not self._has_failed:
            self._was_spared = False
            self.why = "answers probes, and requests again"
        was_away = self.misses > 0
        self.misses = 0
        if self.state not in _JUDGED:
            return
        if was_away:
            self._forgive()
            self._step(HealthEvent.BACK, "answers probes again", now)
        elif self.state is _STARTING:
            self._step(HealthEvent.PROVEN, "answers probes", now)

    def heard(self) -> None:
        """It has answered something: it does not hang."""
        self._silent_since = None

    def missed(self, reason: str, *, now: float, silent: bool = True) -> None:
        """It has missed a probe (``silent``: it has not answered at all); ``reason`` in words."""
        if not silent:
            self.heard()
        elif self._silent_since is None:
            self._silent_since = now
        self.misses += 1
        self._is_probed = False
        if self.misses in (1, self.settings.health_check_failures):  # where ``may_serve`` changes
            self.changes.count += 1
        is_missing = self.misses >= self.settings.health_check_failures
        if self.state is _STARTING:
            self.why = reason
        elif self.state in (_HEALTHY, _HALF_OPEN) and is_missing:
            self._break(reason, now)
        elif is_missing:
            self.cache_since = now  # what is drained may come back as another process, too

    def silent_s(self, *, now: float) -> float:
        """Return for how long it has answered no probe, not even badly; 0: it has."""
        return 0.0 if self._silent_since is None else now - self._silent_since

    def drain(self, *, now: float, why: str = "is to be drained") -> None:
        """It shall get nothing new."""
        self._step(HealthEvent.DRAIN, why, now)

    def empty(self, reason: str, *, now: float) -> None:
        """It has nothing left to do; ``reason``: how that is known."""
        self._step(HealthEvent.EMPTY, reason, now)

    def undrain(self, *, now: float, why: str = "is in use again") -> None:
        """It shall get requests again, once it answers probes if it does not now; one that was not
        draining stays what it is.
        """
        if self.state not in _JUDGED:
            misses = self.misses if self.settings.health_check_interval_s > 0 else 0
            self._forgive()
            self.misses = misses
        self._step(HealthEvent.UNDRAIN, why, now)

    def remove(self, *, now: float) -> None:
        """It is taken out."""
        self._step(HealthEvent.REMOVE, "was removed", now)

    def _alive(self, request: RequestId, now: float) -> None:
        if self.state is _STARTING:
            self._step(HealthEvent.PROVEN, "serves requests", now)
        elif self.state is _HALF_OPEN and self._is_trial(request):
            # its trial has begun well, as those that broke off have
            self._forgive(with_breaks=False)
            self._step(HealthEvent.PROVEN, "has served its trial", now)

    def _is_trial(self, request: RequestId) -> bool:
        return self.trial is not None and self.trial.request == request

    def _verdict(self, failure: Failure, now: float) -> str | None:
        """Say why it is broken, if it is."""
        most = self.settings.circuit_breaker_failures
        ratio = self.ratio
        if not most:
            return None
        if self._in_a_row >= most:
            return f"{self._in_a_row} requests in a row failed: the last one {_SAID[failure]}"
        if self._broken_in_a_row >= most:
            return (
                f"{self._broken_in_a_row} answers in a row broke off: the last one {_SAID[failure]}"
            )
        legs, failed = self._window.totals(now=now)
        if legs >= ratio.min_requests and failed >= ratio.share * legs:
            return f"{failed} of {legs} requests failed: the last one {_SAID[failure]}"
        return None

    def _break(self, reason: str, now: float) -> None:
        self._rest_s = min(self._rest_s * 2 or self.settings.ejection_time_s, self.max_rest_s)
        self.trial = None
        self._step(HealthEvent.TRIPPED, reason, now)
        self.since = now  # a broken engine rests from its latest break on

    def _forgive(self, *, with_breaks: bool = True) -> None:
        self.heard()
        self._in_a_row = 0
        self.misses = 0
        self.trial = None
        if with_breaks:
            self._broken_in_a_row = 0
        if not self._broken_in_a_row:
            self._rest_s = 0.0
        self._window.clear()

    def _step(self, event: HealthEvent, why: str, now: float) -> None:
        before = self.state
        self.state = TRANSITIONS[self.state][event]
        if event is HealthEvent.TRIPPED or before is _EJECTED:
            self.cache_since = now  # it may come back as another process
        if self.state is not before:
            self.since = now
            self.why = why
            self.changes.count += 1
        elif event is HealthEvent.TRIPPED:
            self.why = why
            self.changes.count += 1  # it rests for another time
