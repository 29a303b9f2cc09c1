"""How many engines of each role a traffic needs, by measured rates, or those of an engine's model.

Compute and links follow the utilisation law (Denning and Buzen, 1978): utilisation = arrivals a
second * seconds of work of an arrival / number of servers. The KV cache follows Little's law
(1961): mean number present = arrivals a second * mean time of presence. Waiting times are
approximations: planning/queueing.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, inf, isfinite, sqrt
from typing import Final

from pdrelay_proxy.settings import PolicyName
from pdrelay_tools.percentile import percentile
from pdrelay_tools.planning.engine_model import EngineModel
from pdrelay_tools.planning.queueing import (
    MOST_SKEWED,
    Spread,
    Wait,
    among_routers,
    at_random,
    queues_in_turn,
    shared_queue,
    two_choices,
)

MOST_ENGINES: Final = 10_000  # of a role; a larger number comes from a wrong unit
MOST_ROUTERS: Final = 1000
_MOST: Final = 1e15  # of any number: its square is one, too
# the plan is tested with these multiples of the traffic
SWINGS: Final = (0.75, 1.0, 1.25)


class NoPlan(Exception):
    """No plan follows from these numbers; the message says why, in one sentence."""


class Resource(StrEnum):
    """A limit that decides how many engines are needed."""

    PREFILL_COMPUTE = "prefill compute"
    PREFILL_LINK = "prefill link"
    TTFT = "TTFT target"
    DECODE_COMPUTE = "decode compute"
    DECODE_KV = "decode KV capacity"
    DECODE_LINK = "decode link"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What clients ask for."""

    requests_per_s: float
    prompt: Spread  # tokens
    output: Spread  # tokens
    # share of the prompt tokens that prefill engines find in their prefix caches
    cached: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """The measured rates of one engine of each role."""

    prefill_tokens_per_s: float  # prompt tokens, with a queue that is never empty
    # generated tokens of the whole batch, at the largest batch that keeps the ITL target
    decode_tokens_per_s: float
    kv_capacity_tokens: float  # of a decode engine
    kv_bytes_per_token: float | None = None  # of all layers and ranks together
    link_bytes_per_s: float | None = None  # of one engine; None: links are no limit


@dataclass(frozen=True, slots=True)
class Aims:
    """The targets, and how routers choose."""

    itl_s: float  # seconds between two tokens of one answer, at most
    # 95th percentile of the seconds to the first token, at most; None: no target
    ttft_s: float | None = None
    utilisation: float = 0.7  # share of any resource that may be busy on the mean
    dispatch: PolicyName = PolicyName.ROUND_ROBIN  # how routers choose prefill engines
    routers: int = 1
    peers: bool = True  # they tell each other how many requests engines have


@dataclass(frozen=True, slots=True)
class Ttft:
    """The parts of the time to the first token, in seconds of the mean request."""

    queue: float
    prefill: float
    transfer: float
    first_step: float  # of the decode engine
    p95: float  # of the sum

    @property
    def mean(self) -> float:
        """Return the sum."""
        return self.queue + self.prefill + self.transfer + self.first_step


@dataclass(frozen=True, slots=True)
class Need:
    """How many engines of each role a traffic needs, and the limits that decide."""

    prefill: int
    decode: int
    prefill_by: Resource
    decode_by: Resource


@dataclass(frozen=True, slots=True)
class Outlook:
    """Load and TTFT that a number of engines would have."""

    utilisation: Mapping[Resource, float]
    ttft: Ttft | None  # None: the queue grows without end
    decode_batch: float  # requests on one decode engine, on the mean


@dataclass(frozen=True, slots=True)
class Swing:
    """The planned engines under another traffic, and the engines that this would need."""

    factor: float
    need: Need | None  # None: no number of engines would do; the plan itself always has one
    outlook: Outlook


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The answer."""

    need: Need
    work: Mapping[Resource, float]  # engines that each resource would keep busy all the time
    outlook: Outlook
    swings: tuple[Swing, ...]


def plan(traffic: Traffic, rates: Rates, aims: Aims) -> CapacityPlan:
    """Size both pools.

    Raises NoPlan: the numbers make no sense, or no number of engines meets the targets.
    """
    _check(traffic, rates, aims)
    need = _need(traffic, rates, aims)
    swings = list[Swing]()
    for factor in SWINGS:
        scaled = replace(traffic, requests_per_s=traffic.requests_per_s * factor)
        try:
            its_need = _need(scaled, rates, aims)
        except NoPlan:
            its_need = None
        swings.append(Swing(factor, its_need, _outlook(need, scaled, rates, aims)))
    return CapacityPlan(
        need, _work(traffic, rates, aims), _outlook(need, traffic, rates, aims), tuple(swings)
    )


def rates_of(prefill: EngineModel, decode: EngineModel, traffic: Traffic, aims: Aims) -> Rates:
    """Return the rates of engines that `pdrelay replay` simulates, in place of measured ones.

    Raises NoPlan.
    """
    _check_traffic(traffic, aims)
    prompt = traffic.prompt
    output = traffic.output
    prompt_s = prefill.prompt_s(prompt.mean, prompt.mean**2 * (1 + prompt.cv2), traffic.cached)
    computed = prompt.mean * (1 - traffic.cached)
    decode_rate = decode.decode_rate(prompt.mean + output.mean * (1 + output.cv2) / 2, aims.itl_s)
    if not decode_rate:
        raise NoPlan(
            f"a decode engine like this does not keep an ITL of {aims.itl_s:g} s, not even for one "
            f"request"
        )
    return Rates(
        prefill_tokens_per_s=computed / prompt_s if prompt_s else inf,
        decode_tokens_per_s=decode_rate,
        kv_capacity_tokens=decode.kv_tokens,
        kv_bytes_per_token=prefill.kv_bytes_per_token,
        link_bytes_per_s=min(prefill.link_bytes_per_s, decode.link_bytes_per_s),
    )


def _work(traffic: Traffic, rates: Rates, aims: Aims) -> Mapping[Resource, float]:
    """Return how many engines each resource would keep busy all the time.

    Compute: utilisation law, with the uncached prompt tokens, and with the generated tokens.
    KV capacity: Little's law. An answer of n tokens stays for n ITLs and holds prompt + n / 2
    tokens on average. With E[n^2] = mean^2 (1 + cv^2), and prompt and answer independent, that is
    mean * ITL * (prompt + mean (1 + cv^2) / 2).
    Links: utilisation law with the bytes of a whole prompt, out of a prefill engine and into a
    decode engine. (A decode engine with a cached prefix reads less.)
    """
    rate = traffic.requests_per_s
    prompt = traffic.prompt
    output = traffic.output
    token_seconds = output.mean * aims.itl_s * (prompt.mean + output.mean * (1 + output.cv2) / 2)
    transfer = _transfer(traffic, rates)
    moved = None if transfer is None else rate * transfer.mean
    work = {
        Resource.PREFILL_COMPUTE: rate * _service(traffic, rates).mean,
        Resource.PREFILL_LINK: moved,
        Resource.DECODE_COMPUTE: rate * output.mean / rates.decode_tokens_per_s,
        Resource.DECODE_KV: rate * token_seconds / rates.kv_capacity_tokens,
        Resource.DECODE_LINK: moved,
    }
    return {name: amount for name, amount in work.items() if amount is not None}


def _need(traffic: Traffic, rates: Rates, aims: Aims) -> Need:
    work = _work(traffic, rates, aims)
    x, x_by = _most(work, PREFILL_SIDE, aims)
    y, y_by = _most(work, DECODE_SIDE, aims)
    if (target := aims.ttft_s) is not None:

        def is_enough(count: int) -> bool:
            ttft = _ttft(count, traffic, rates, aims)
            return ttft is not None and ttft.p95 <= target

        least = _fewest(is_enough, x)
        if least > x:
            x = least
            x_by = Resource.TTFT
    return Need(x, y, x_by, y_by)


PREFILL_SIDE: Final = (Resource.PREFILL_COMPUTE, Resource.PREFILL_LINK)
DECODE_SIDE: Final = (Resource.DECODE_COMPUTE, Resource.DECODE_KV, Resource.DECODE_LINK)


def _most(
    work: Mapping[Resource, float], side: tuple[Resource, ...], aims: Aims
) -> tuple[int, Resource]:
    decides = max(
        (resource for resource in side if resource in work), key=lambda resource: work[resource]
    )
    count = work[decides] / aims.utilisation
    if count > MOST_ENGINES:
        raise NoPlan(
            f"{decides} would need {count:,.0f} engines, more than {MOST_ENGINES:,}: look at the "
            f"units"
        )
    return max(1, ceil(count - 1e-9)), decides


def _fewest(is_enough: Callable[[int], bool], least: int) -> int:
    """Return the smallest number from ``least`` on that is enough, as all larger ones are."""
    most = least
    while not is_enough(most):
        least = most + 1
        most = most * 2
        if most > 2 * MOST_ENGINES:
            raise NoPlan(
                f"the TTFT target cannot be met with {MOST_ENGINES:,} prefill engines: it leaves "
                f"too little room"
            )
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if is_enough(middle) else (middle + 1, most)
    return most


def _ttft(x: int, traffic: Traffic, rates: Rates, aims: Aims) -> Ttft | None:
    """Return the time to the first token in pull, where no parts overlap; None: an endless queue.

    Prompts are assumed to be computed one at a time; several short ones in one step are a little
    faster. Queueing and computing are independent, so the parts of their p95s beyond their means
    add as squares.
    """
    service = _service(traffic, rates)
    transfer = _transfer(traffic, rates)
    wait = _wait(x, traffic.requests_per_s, service, aims)
    if not isfinite(wait.mean):
        return None
    own = Spread(0, 0, 0) if transfer is None else transfer
    alone = service.p95 + own.p95 - service.mean - own.mean  # a longer prompt also travels longer
    beyond = sqrt(max(0.0, wait.p95 - wait.mean) ** 2 + alone**2)
    mean = wait.mean + service.mean + own.mean + aims.itl_s
    return Ttft(wait.mean, service.mean, own.mean, aims.itl_s, mean + beyond)


def _wait(x: int, rate: float, service: Spread, aims: Aims) -> Wait:
    """Return the wait in the queues of prefill engines.

    Peers do not help round_robin: each router has its own order.
    """
    wait = WAITS[aims.dispatch](x, rate, service)
    if aims.routers == 1 or (aims.peers and aims.dispatch is not PolicyName.ROUND_ROBIN):
        return wait
    return among_routers(
        wait, at_random(x, rate, service), aims.routers, min(1.0, rate * service.mean / x)
    )


WAITS: Final[Mapping[PolicyName, Callable[[int, float, Spread], Wait]]] = {
    PolicyName.ROUND_ROBIN: queues_in_turn,
    PolicyName.LEAST_LOADED: shared_queue,
    PolicyName.POWER_OF_TWO: two_choices,
}


def _service(traffic: Traffic, rates: Rates) -> Spread:
    """Return the seconds of a prefill engine that a prompt takes."""
    return traffic.prompt.times((1 - traffic.cached) / rates.prefill_tokens_per_s)


def _transfer(traffic: Traffic, rates: Rates) -> Spread | None:
    """Return the seconds of a link that a prompt takes; None: links are no limit."""
    if rates.link_bytes_per_s is None or rates.kv_bytes_per_token is None:
        return None
    return traffic.prompt.times(rates.kv_bytes_per_token / rates.link_bytes_per_s)


def _outlook(need: Need, traffic: Traffic, rates: Rates, aims: Aims) -> Outlook:
    work = _work(traffic, rates, aims)
    used = {
        name: amount / (need.prefill if name in PREFILL_SIDE else need.decode)
        for name, amount in work.items()
    }
    batch = traffic.requests_per_s * traffic.output.mean * aims.itl_s / need.decode  # Little's law
    return Outlook(used, _ttft(need.prefill, traffic, rates, aims), batch)


def lengths(quantity: str, mean: float, p95: float | None) -> Spread:
    """Return the spread of a number of tokens; without a p95, an exponential one.

    Raises NoPlan: no such spread exists.
    """
    _positive(f"{quantity} tokens (mean)", mean)
    if p95 is None:
        return Spread.exponential(mean)
    _positive(f"{quantity} tokens (p95)", p95)
    if p95 < mean:
        raise NoPlan(f"the p95 of the {quantity} tokens, {p95:g}, is below their mean of {mean:g}")
    if p95 > mean * MOST_SKEWED:
        fault = (
            f"the p95 of the {quantity} tokens, {p95:g}, is more than {MOST_SKEWED:.2f} times their "
            f"mean of {mean:g}"
        )
        raise NoPlan(
            f"{fault}: no lognormal distribution is like that, so give the lengths themselves"
        )
    return Spread.lognormal(mean, p95)


def observed(quantity: str, values: list[float]) -> Spread:
    """Return the spread of observed lengths; raises NoPlan: none, or one is no length."""
    if not values:
        raise NoPlan(f"there are no {quantity} lengths")
    for value in values:
        _positive(f"every {quantity} length", value)
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return Spread(mean, variance / mean**2, percentile(sorted(values), 95))


def _check_traffic(traffic: Traffic, aims: Aims) -> None:
    positive: Mapping[str, float | None] = {
        "requests a second": traffic.requests_per_s,
        "prompt tokens (mean)": traffic.prompt.mean,
        "output tokens (mean)": traffic.output.mean,
        "the ITL target in seconds": aims.itl_s,
        "the TTFT target in seconds": aims.ttft_s,
        "the target utilisation": aims.utilisation,
    }
    for name, value in positive.items():
        if value is not None:
            _positive(name, value)
    if not 0 <= traffic.cached < 1:
        raise NoPlan(
            f"the share of cached prompt tokens must be 0 or more and below 1, not "
            f"{traffic.cached:g}"
        )
    if not 1 <= aims.routers <= MOST_ROUTERS:
        raise NoPlan(f"there are 1 to {MOST_ROUTERS} routers, not {aims.routers}")
    if not aims.utilisation < 1:
        raise NoPlan(
            f"the target utilisation must be below 1, not {aims.utilisation:g}: at 1 queues grow "
            f"without end"
        )


def _check(traffic: Traffic, rates: Rates, aims: Aims) -> None:
    _check_traffic(traffic, aims)
    positive: Mapping[str, float | None] = {
        "prefill tokens a second": rates.prefill_tokens_per_s,
        "decode tokens a second": rates.decode_tokens_per_s,
        "KV capacity in tokens": rates.kv_capacity_tokens,
        "KV bytes per token": rates.kv_bytes_per_token,
        "link bandwidth": rates.link_bytes_per_s,
    }
    for name, value in positive.items():
        if value is not None:
            _positive(name, value)
    if (rates.link_bytes_per_s is None) != (rates.kv_bytes_per_token is None):
        raise NoPlan("link bandwidth and KV bytes per token belong together: give both, or neither")
    longest = traffic.prompt.p95 + traffic.output.p95
    if longest > rates.kv_capacity_tokens:
        fault = f"a long request (p95) has {longest:,.0f} tokens"
        raise NoPlan(f"{fault}, and a decode engine has room for {rates.kv_capacity_tokens:,.0f}")
    # By Little's law the batch at which the rate was measured is rate * ITL: one request alone
    # makes 1 / ITL.
    if rates.decode_tokens_per_s * aims.itl_s < 1:
        fault = f"a decode engine that makes {rates.decode_tokens_per_s:g} tokens a second"
        raise NoPlan(f"{fault} does not keep an ITL of {aims.itl_s:g} s, not even for one request")
    transfer = _transfer(traffic, rates)
    alone = _service(traffic, rates).p95 + (0 if transfer is None else transfer.p95) + aims.itl_s
    if aims.ttft_s is not None and alone > aims.ttft_s:
        fault = f"a TTFT of {aims.ttft_s:g} s (p95) cannot be met with any number of engines"
        raise NoPlan(f"{fault}: a long prompt (p95) takes {alone:.3g} s on idle ones")


def _positive(name: str, value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise NoPlan(f"{name} must be a number above 0, not {value:g}")
    if not 1 / _MOST <= value <= _MOST:
        raise NoPlan(f"{name} cannot be {value:g}: look at the units")
