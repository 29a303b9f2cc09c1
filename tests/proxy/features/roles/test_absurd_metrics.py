"""One engine that shows nonsense must not end the decisions for all others."""

import math
from random import Random

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.features.roles.engine_totals import EngineReading, engine_totals
from pdrelay_proxy.features.roles.role_controller import FleetSnapshot, RoleController, Verdict
from support.fluid_fleet import LIMITS, TARGETS
from support.searching import examples

ABSURD = ("NaN", "+Inf", "-Inf", "Inf", "-1.0", "-1e-300", "1e300", "1e17", "1e999", "0x10", "one", "")
SOUND = ("0", "0.0", "1", "3.0", "5e-324", "1e-99", "1.5e+03", "1e8", "987654321.5", "1e+08")
NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "request_prompt_tokens_count",
    "request_prefill_time_seconds_sum",
    "iteration_tokens_total_count",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "prompt_tokens_by_source_total",
)
ROLES = {"p0": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
values = st.one_of(st.sampled_from(SOUND), st.floats(0.0, 1e8).map(repr), st.integers(0, 10**8).map(str))
shown = st.fixed_dictionaries(dict.fromkeys(NAMES, values))


def exposition(found):
    lines = [f'vllm:{name}{{engine="0",source="local_compute"}} {value}' for name, value in found.items()]
    return "\n".join(["# HELP of vLLM", *lines, ""]).encode()


@hypothesis_settings(max_examples=examples(50))
@given(found=shown, name=st.sampled_from(NAMES), value=st.one_of(st.sampled_from(ABSURD), st.floats().map(str)))
def test_an_engine_with_an_absurd_number_shows_nothing(found, name, value):
    """Half of its numbers would be a lie; ranks beside it at the same address are not concerned."""
    text = exposition(found | {name: value})
    totals, other = engine_totals(text, 0, now=5.0), engine_totals(exposition(found), 0, now=5.0)

    is_sound = value not in ABSURD and 0.0 <= float(value) <= 1e8
    assert other is not None
    if is_sound or value in ABSURD:
        assert (totals is not None) == is_sound
    if totals is not None:
        numbers = [getattr(totals, each) for each in totals.__slots__]
        assert all(number is None or (math.isfinite(number) and number >= 0) for number in numbers)
    beside = text.replace(b'engine="0"', b'engine="1"') + exposition(found)
    assert engine_totals(beside, 0, now=5.0) == other


@hypothesis_settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**32), sizes=st.sampled_from([(10.0, 1e8), (1e8, 1e-9), (1e15, 1e-9), (1e80, 1e-80)]))
def test_no_numbers_of_an_engine_end_the_decisions(seed, sizes):
    """They are made for the whole fleet: an error in one of them turned no engine, and said so in the log alone."""
    dice = Random(seed)
    controller = RoleController(TARGETS, LIMITS)
    rise = {(name, metric): dice.choice((0.0, 10.0, *sizes)) for name in ROLES for metric in NAMES}
    totals = dict.fromkeys(rise, 0.0)
    for number in range(24):
        readings = list[EngineReading]()
        for key, most in rise.items():
            before = totals[key] if key[1] not in NAMES[:3] and dice.random() < 0.99 else 0.0  # it was restarted
            totals[key] = before + most * dice.choice((0.0, 1.0, dice.random()))
        for name, role in ROLES.items():
            found = {metric: repr(totals[name, metric]) for metric in NAMES}
            if name == "d1" and number >= 20:
                found["inter_token_latency_seconds_sum"] = "NaN"
            shows = engine_totals(exposition(found), 0, now=10.0 * number)
            readings.append(EngineReading(InstanceId(name), role, name, shows))
        decision = controller.decide(FleetSnapshot(readings), now=10.0 * number)

    assert decision.verdict is Verdict.UNKNOWN
    assert "d1" in decision.why
