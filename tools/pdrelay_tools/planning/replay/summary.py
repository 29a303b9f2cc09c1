"""The results of a replay: one row of numbers for each policy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from pdrelay_proxy.core.model import Role
from pdrelay_tools.percentile import percentile
from pdrelay_tools.planning.replay.simulation import Replayed, Served
from pdrelay_tools.planning.replay.traces import NoReplay


@dataclass(frozen=True, slots=True)
class Targets:
    """The limits within which a request counts as served well."""

    ttft_s: float = inf
    itl_s: float = inf  # mean time between two tokens of the request


@dataclass(frozen=True, slots=True)
class Summary:
    """Times are seconds; shares are of 1; None: nothing of that kind happened."""

    policy: str
    requests: int
    seconds: float  # from the first arrival to the last token
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    later_ttft_p50: float | None  # of requests that go on with a conversation
    itl_p50: float | None
    itl_p99: float | None
    prefill_hits: float | None  # share of prompt tokens that prefill engines had in their caches
    decode_hits: float | None  # the same of decode engines, before they read anything
    # of the tokens that the best of all caches had, those that the computing engine hit
    best_hits: float | None
    # prompt tokens that engines computed, for each that no prompt or answer had before
    computed_per_new: float
    good: float  # share of requests within the targets
    good_per_s: float
    prefill_unevenness: float | None  # busy time of the busiest engine, over the mean
    decode_unevenness: float | None


def summarise(replayed: Replayed, targets: Targets) -> Summary:
    """Return the row of one policy; raises NoReplay: nothing was served, or it took no time."""
    served = replayed.served
    if not served:
        raise NoReplay("there is no request to replay: give more of them, or more time")
    seconds = max(request.ended for request in served) - min(request.came for request in served)
    if not seconds:
        raise NoReplay("with these engines a request takes no time: give them seconds of a step")
    ttft = sorted(request.ttft_s for request in served)
    later = sorted(request.ttft_s for request in served if request.turn.goes_on is not None)
    gaps = sorted(gap for _, log in replayed.engines for gap in log.gaps)
    good = sum(
        request.ttft_s <= targets.ttft_s and request.itl_s <= targets.itl_s for request in served
    )
    requests = len(served)
    computed = sum(leg.computed_tokens for request in served for _, leg in request.legs)
    return Summary(
        policy=replayed.policy,
        requests=requests,
        seconds=seconds,
        ttft_p50=percentile(ttft, 50),
        ttft_p95=percentile(ttft, 95),
        ttft_p99=percentile(ttft, 99),
        later_ttft_p50=percentile(later, 50) if later else None,
        itl_p50=_weighted_quantile(gaps, 0.5) if gaps else None,
        itl_p99=_weighted_quantile(gaps, 0.99) if gaps else None,
        prefill_hits=_hits(replayed, Role.PREFILL),
        decode_hits=_hits(replayed, Role.DECODE),
        best_hits=_of_the_best(served),
        computed_per_new=computed / sum(request.new_tokens for request in served),
        good=good / requests,
        good_per_s=good / seconds,
        prefill_unevenness=_unevenness(
            log.busy_s for role, log in replayed.engines if role is Role.PREFILL
        ),
        decode_unevenness=_unevenness(
            log.busy_s for role, log in replayed.engines if role is Role.DECODE
        ),
    )


def _weighted_quantile(values: Sequence[tuple[float, int]], share: float) -> float:
    remaining = share * sum(weight for _, weight in values)
    for value, weight in values:
        remaining -= weight
        if remaining <= 0:
            return value
    return values[-1][0]


def _hits(replayed: Replayed, role: Role) -> float | None:
    legs = [
        leg for request in replayed.served for its_role, leg in request.legs if its_role is role
    ]
    return (
        sum(leg.cached_tokens for leg in legs) / sum(leg.prompt_tokens for leg in legs)
        if legs
        else None
    )


def _of_the_best(served: Iterable[Served]) -> float | None:
    """Return the hits of later turns as a share of the best cache's hits; None: no hits."""
    later = [request for request in served if request.turn.goes_on is not None]
    best = sum(request.best_hit for request in later)
    return sum(min(request.hit, request.best_hit) for request in later) / best if best else None


def _unevenness(busy: Iterable[float]) -> float | None:
    times = list(busy)
    return max(times) * len(times) / sum(times) if sum(times) else None
