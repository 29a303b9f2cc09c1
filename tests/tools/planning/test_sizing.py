"""The calculator behind ``pdrelay plan``, beside a simulation of the queues that it predicts."""

import math
import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.settings import PolicyName
from pdrelay_tools.planning.queueing import Spread
from pdrelay_tools.planning.sizing import (
    WAITS,
    Aims,
    NoPlan,
    Rates,
    Resource,
    Traffic,
    lengths,
    observed,
    plan,
)

TRAFFIC = Traffic(20.0, Spread.lognormal(3000, 8000), Spread.lognormal(250, 700))
RATES = Rates(24_000.0, 2_600.0, 420_000.0, 131_072.0, 12.5e9)
AIMS = Aims(itl_s=0.03, ttft_s=1.5)
ARRIVALS = 120_000


def _drawing(spread, dice):
    """Draw from the lognormal distribution of this mean and variance."""
    sigma = math.sqrt(math.log(1 + spread.cv2))
    mu = math.log(spread.mean) - sigma**2 / 2
    return lambda: math.exp(mu + sigma * dice.gauss(0, 1))


def test_the_planned_pools_behave_as_predicted():
    """The whole chain simulated: prefill engines in turn, links, decode engines that make one token an ITL."""
    found = plan(TRAFFIC, RATES, AIMS)
    dice = random.Random(8)
    x = found.need.prefill
    y = found.need.decode
    prompt_of, output_of = _drawing(TRAFFIC.prompt, dice), _drawing(TRAFFIC.output, dice)
    free = [0.0] * x
    now = 0.0
    ttfts = []
    prefill_s = decode_s = kv_token_s = link_s = 0.0
    for number in range(ARRIVALS):
        now += dice.expovariate(TRAFFIC.requests_per_s)
        prompt = prompt_of()
        output = output_of()
        service, transfer = prompt / RATES.prefill_tokens_per_s, prompt * 131_072 / 12.5e9
        done = max(now, free[number % x]) + service
        free[number % x] = done
        ttfts.append(done - now + transfer + AIMS.itl_s)
        prefill_s += service
        link_s += transfer
        decode_s += output / RATES.decode_tokens_per_s
        kv_token_s += output * AIMS.itl_s * (prompt + output / 2)
    used = found.outlook.utilisation

    assert used[Resource.PREFILL_COMPUTE] == pytest.approx(prefill_s / x / now, rel=0.03)
    assert used[Resource.DECODE_COMPUTE] == pytest.approx(decode_s / y / now, rel=0.03)
    assert used[Resource.DECODE_KV] == pytest.approx(kv_token_s / RATES.kv_capacity_tokens / y / now, rel=0.05)
    assert used[Resource.DECODE_LINK] == pytest.approx(link_s / y / now, rel=0.03)
    assert found.outlook.ttft.mean == pytest.approx(sum(ttfts) / ARRIVALS, rel=0.10)
    assert found.outlook.ttft.p95 == pytest.approx(sorted(ttfts)[int(0.95 * ARRIVALS)], rel=0.15)


@pytest.mark.parametrize(
    ("change", "decides"),
    [
        ({}, Resource.DECODE_COMPUTE),
        ({"kv_capacity_tokens": 60_000.0}, Resource.DECODE_KV),
        ({"link_bytes_per_s": 2.5e9}, Resource.DECODE_LINK),
    ],
)
def test_the_scarcest_resource_decides(change, decides):
    """Each of the three of a decode engine can be it."""
    found = plan(TRAFFIC, replace(RATES, **change), replace(AIMS, ttft_s=None))
    used = {name: share for name, share in found.outlook.utilisation.items() if name.startswith("decode")}

    assert found.need.decode_by is decides
    assert max(used, key=used.get) is decides
    assert used[decides] <= AIMS.utilisation


def test_a_tight_ttft_needs_more_prefill_engines_than_their_work():
    """And the fewest that keep it."""
    loose = plan(TRAFFIC, RATES, replace(AIMS, ttft_s=None))
    tight = plan(TRAFFIC, RATES, replace(AIMS, ttft_s=0.5))

    assert (loose.need.prefill_by, tight.need.prefill_by) == (Resource.PREFILL_COMPUTE, Resource.TTFT)
    assert tight.need.prefill > loose.need.prefill
    assert tight.outlook.ttft.p95 <= 0.5
    one_less = plan(TRAFFIC, RATES, replace(AIMS, utilisation=2.5 / (tight.need.prefill - 1), ttft_s=None))
    assert one_less.need.prefill == tight.need.prefill - 1
    assert one_less.outlook.ttft.p95 > 0.5


def test_a_cache_saves_prefill_and_nothing_else():
    """Decode engines hold, and links carry, the whole prompt."""
    without, with_half = plan(TRAFFIC, RATES, AIMS), plan(replace(TRAFFIC, cached=0.5), RATES, AIMS)

    assert with_half.work[Resource.PREFILL_COMPUTE] == pytest.approx(without.work[Resource.PREFILL_COMPUTE] / 2)
    rest = set(without.work) - {Resource.PREFILL_COMPUTE}
    assert all(with_half.work[name] == without.work[name] for name in rest)


def test_the_least_loaded_engine_makes_for_a_shorter_queue_than_turns():
    """The reason to choose that policy for prompts of unequal lengths."""
    turns, shared, two = (plan(TRAFFIC, RATES, replace(AIMS, dispatch=dispatch)) for dispatch in WAITS)

    assert shared.outlook.ttft.queue < two.outlook.ttft.queue < turns.outlook.ttft.queue


def test_routers_that_know_nothing_of_each_other_make_for_longer_queues():
    """So 224 requests a second on 32 engines, with the least loaded one, do not wait 0 ms behind 16 routers."""
    traffic = Traffic(224.0, Spread.exponential(1000), Spread.exponential(100))
    rates = Rates(10_000.0, 2_600.0, 420_000.0)
    aims = Aims(itl_s=0.03, dispatch=PolicyName.LEAST_LOADED)
    queues = {
        (routers, peers): plan(traffic, rates, replace(aims, routers=routers, peers=peers)).outlook.ttft.queue
        for routers in (1, 2, 16)
        for peers in (True, False)
    }

    assert queues[1, True] == queues[1, False] == queues[2, True] == queues[16, True] < 0.005
    assert 0.01 < queues[2, False] < queues[16, False]
    assert queues[16, False] > 0.1
    in_turn = replace(aims, dispatch=PolicyName.ROUND_ROBIN, routers=16)
    assert plan(traffic, rates, in_turn).outlook.ttft.queue > 0.1  # turns are each router's own


def test_swings_tell_what_other_traffic_would_need_and_do():
    """A quarter less and a quarter more; more than the engines can do makes a queue without end."""
    less, same, more = plan(TRAFFIC, RATES, replace(AIMS, utilisation=0.85)).swings

    assert less.need.prefill <= same.need.prefill <= more.need.prefill
    assert less.outlook.ttft.p95 < same.outlook.ttft.p95
    assert more.outlook.utilisation[Resource.PREFILL_COMPUTE] > 1
    assert more.outlook.ttft is None


def _no_plan(**changes):
    kinds = {"traffic": TRAFFIC, "rates": RATES, "aims": AIMS}
    for name, value in changes.items():
        owner = next(kind for kind, one in kinds.items() if hasattr(one, name))
        kinds[owner] = replace(kinds[owner], **{name: value})
    with pytest.raises(NoPlan) as refused:
        plan(kinds["traffic"], kinds["rates"], kinds["aims"])
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"requests_per_s": 0.0}, "requests a second must be a number above 0, not 0"),
        ({"requests_per_s": math.nan}, "requests a second must be a number above 0, not nan"),
        ({"prefill_tokens_per_s": math.inf}, "prefill tokens a second must be a number above 0, not inf"),
        ({"decode_tokens_per_s": -1.0}, "decode tokens a second must be a number above 0, not -1"),
        ({"cached": 1.0}, "cached prompt tokens must be 0 or more and below 1, not 1"),
        ({"utilisation": 1.0}, "target utilisation must be below 1, not 1"),
        ({"link_bytes_per_s": None}, "give both, or neither"),
        ({"kv_capacity_tokens": 5000.0}, "a decode engine has room for 5,000"),
        ({"decode_tokens_per_s": 20.0}, "does not keep an ITL of 0.03 s, not even for one request"),
        ({"ttft_s": 0.2}, "a long prompt (p95) takes 0.447 s on idle ones"),
        ({"requests_per_s": 1e6}, "more than 10,000: look at the units"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(changes, said):
    """It names the thing, the value and what would be right."""
    assert said in _no_plan(**changes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((100, 50), "the p95 of the prompt tokens, 50, is below their mean of 100"),
        ((100, 400), "more than 3.87 times their mean of 100"),
        ((0, None), "prompt tokens (mean) must be a number above 0, not 0"),
        ((100, math.inf), "prompt tokens (p95) must be a number above 0, not inf"),
        ((1e200, None), "prompt tokens (mean) cannot be 1e+200: look at the units"),
        ((1e-200, None), "prompt tokens (mean) cannot be 1e-200: look at the units"),
    ],
)
def test_lengths_that_cannot_be_are_refused(arguments, said):
    """A p95 is what people mix up with a maximum."""
    with pytest.raises(NoPlan) as refused:
        lengths("prompt", *arguments)

    assert said in str(refused.value)


@given(
    rate=st.floats(0.01, 500),
    prompt=st.floats(10, 50_000),
    skew=st.floats(1.0, 3.8),
    output=st.floats(1, 5_000),
    utilisation=st.floats(0.05, 0.99),
    dispatch=st.sampled_from(list(WAITS)),
)
def test_every_plan_keeps_its_targets_with_the_fewest_engines(rate, prompt, skew, output, utilisation, dispatch):
    """Whatever the numbers: no resource above the target, and one engine less of a role would break it."""
    traffic = Traffic(rate, Spread.lognormal(prompt, prompt * skew), Spread.exponential(output))
    aims = Aims(itl_s=0.03, utilisation=utilisation, dispatch=dispatch)
    with suppress(NoPlan):  # a request that does not fit, or too many engines: test_nonsense_... says what of
        _check_fewest(plan(traffic, RATES, aims), utilisation)


def _check_fewest(found, utilisation):
    assert all(share <= utilisation * (1 + 1e-6) for share in found.outlook.utilisation.values())
    for count, decides in ((found.need.prefill, found.need.prefill_by), (found.need.decode, found.need.decode_by)):
        assert count == 1 or found.work[decides] / (count - 1) > utilisation
    assert 0 <= found.outlook.ttft.queue < math.inf
    assert found.outlook.ttft.p95 >= found.outlook.ttft.mean


def test_observed_lengths_have_their_own_mean_spread_and_p95():
    """Of 20 lengths the 19th is the p95."""
    found = observed("prompt", [float(number) for number in range(1, 21)])

    assert (found.mean, found.p95) == (10.5, 19.0)
    assert found.cv2 == pytest.approx((20**2 - 1) / 12 / 10.5**2)
