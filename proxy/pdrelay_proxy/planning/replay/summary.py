"""What a replay comes to, in one row of numbers for each policy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.planning.replay.simulation import Replayed, Served
from pdrelay_proxy.planning.replay.traces import NoReplay

NO_CLASSES: Final[Mapping[str, "Targets"]] = {}


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request must keep to count as served well."""

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
    best_hits: float | None  # of the tokens that the best of all caches had, those that the computing engine hit
    computed_per_new: float  # prompt tokens that engines computed, for each that no prompt or answer had before
    good: float  # share of requests within the targets
    good_per_s: float
    prefill_unevenness: float | None  # busy time of the busiest engine, over the mean
    decode_unevenness: float | None
    classes: Sequence["ClassSummary"] = ()  # none: there are no classes, or all requests are of one


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One class of requests; times are seconds; None: none was served."""

    name: str
    requests: int
    good: float  # share of requests within the targets
    refused: float  # share
    tokens_per_s: float  # of prompts and answers that were served
    ttft_p50: float | None
    ttft_p95: float | None


def summarise(replayed: Replayed, targets: Targets, by_class: Mapping[str, Targets] = NO_CLASSES) -> Summary:
    """Return the row of one policy; raises NoReplay: nothing was served. ``by_class``: targets of classes."""
    served = replayed.served
    if not served:
        raise NoReplay(f"with {replayed.policy} all requests were refused: the targets are too tight for these engines")
    seconds = max(one.ended for one in served) - min(one.came for one in served)
    ttft = sorted(one.ttft_s for one in served)
    later = sorted(one.ttft_s for one in served if one.turn.goes_on is not None)
    gaps = sorted(gap for _, log in replayed.engines for gap in log.gaps)
    good = sum(_is_good(one, by_class.get(one.turn.service_class or "", targets)) for one in served)
    requests = len(served) + len(replayed.refused)
    computed = sum(leg.computed_tokens for one in served for _, leg in one.legs)
    return Summary(
        policy=replayed.policy,
        requests=requests,
        seconds=seconds,
        ttft_p50=_quantile(ttft, 0.5),
        ttft_p95=_quantile(ttft, 0.95),
        ttft_p99=_quantile(ttft, 0.99),
        later_ttft_p50=_quantile(later, 0.5) if later else None,
        itl_p50=_weighted_quantile(gaps, 0.5) if gaps else None,
        itl_p99=_weighted_quantile(gaps, 0.99) if gaps else None,
        prefill_hits=_hits(replayed, Role.PREFILL),
        decode_hits=_hits(replayed, Role.DECODE),
        best_hits=_of_the_best(served),
        computed_per_new=computed / sum(one.new_tokens for one in served),
        good=good / requests,
        good_per_s=good / seconds,
        prefill_unevenness=_unevenness(log.busy_s for role, log in replayed.engines if role is Role.PREFILL),
        decode_unevenness=_unevenness(log.busy_s for role, log in replayed.engines if role is Role.DECODE),
        classes=[_class(name, replayed, one, seconds) for name, one in by_class.items()],
    )


def _class(name: str, replayed: Replayed, targets: Targets, seconds: float) -> ClassSummary:
    served = [one for one in replayed.served if one.turn.service_class == name]
    refused = sum(turn.service_class == name for turn in replayed.refused)
    requests, ttft = max(1, len(served) + refused), sorted(one.ttft_s for one in served)
    return ClassSummary(
        name=name,
        requests=len(served) + refused,
        good=sum(_is_good(one, targets) for one in served) / requests,
        refused=refused / requests,
        tokens_per_s=sum(one.turn.prompt_tokens + one.turn.output_tokens for one in served) / seconds,
        ttft_p50=_quantile(ttft, 0.5) if ttft else None,
        ttft_p95=_quantile(ttft, 0.95) if ttft else None,
    )


def _is_good(one: Served, targets: Targets) -> bool:
    return one.ttft_s <= targets.ttft_s and one.itl_s <= targets.itl_s


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so many are not above; the values are sorted."""
    return values[max(0, -int(-share * len(values) // 1) - 1)]


def _weighted_quantile(values: Sequence[tuple[float, int]], share: float) -> float:
    left = share * sum(weight for _, weight in values)
    for value, weight in values:
        left -= weight
        if left <= 0:
            return value
    return values[-1][0]


def _hits(replayed: Replayed, role: Role) -> float | None:
    legs = [leg for one in replayed.served for its_role, leg in one.legs if its_role is role]
    return sum(leg.cached_tokens for leg in legs) / sum(leg.prompt_tokens for leg in legs) if legs else None


def _of_the_best(served: Iterable[Served]) -> float | None:
    """Return the hits of later turns beside those of an oracle that sees all caches; None: there was nothing to hit."""
    later = [one for one in served if one.turn.goes_on is not None]
    best = sum(one.best_hit for one in later)
    return sum(min(one.hit, one.best_hit) for one in later) / best if best else None


def _unevenness(busy: Iterable[float]) -> float | None:
    times = list(busy)
    return max(times) * len(times) / sum(times) if sum(times) else None
