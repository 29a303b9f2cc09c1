"""Decode engines that are promised a KV cache and get none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.engine_metrics import received
from pdrelay_proxy.core.fleet.kv_inflow import KvInflow
from pdrelay_proxy.core.model import InstanceId

D = InstanceId("decode-0")
# As vLLM 0.32 writes it.
EXPOSITION = b"""# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 900.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 16.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 1.2e+03
vllm:prompt_tokens_by_source_total{engine="1",model_name="tiny",source="external_kv_transfer"} 5.0
vllm:prompt_tokens_by_source_created{engine="0",model_name="tiny",source="external_kv_transfer"} 1.7e+09
vllm:prompt_tokens_cached_total{engine="0",model_name="tiny"} 1216.0
"""


@pytest.mark.parametrize(("rank", "tokens"), [(None, 1221.0), (0, 1216.0), (1, 5.0), (2, None)])
def test_what_an_engine_did_not_compute_is_read_from_its_counters(rank, tokens):
    """Also of one rank among several behind an address."""
    assert received(EXPOSITION, rank) == tokens


@pytest.mark.parametrize("text", [b"", b"vllm:prompt_tokens_by_source_total{} 1\n", EXPOSITION[:90], b"\xff"])
def test_an_engine_that_does_not_say_is_unknown(text):
    """An older version, or another program."""
    assert received(text) is None


def looks(*pairs):
    inflow = KvInflow()
    return [inflow.missing_legs(D, received, promised) for received, promised in pairs]


def test_legs_are_dry_if_the_engine_has_counted_nothing_around_them():
    """They are told once, three looks later at most."""
    assert looks((7, 10), (7, 10), (7, 14), (7, 14), (7, 14)) == [0, 0, 0, 4, 0]


def test_an_engine_that_gets_something_is_not_dry():
    """However little: it may have been a small prompt, or one that it had."""
    assert looks((7, 10), (7, 10), (8, 14), (8, 14), (8, 14)) == [0] * 5


def test_without_legs_there_is_nothing_to_miss():
    """An idle engine counts nothing."""
    assert looks(*[(7, 10)] * 8) == [0] * 8


@pytest.mark.parametrize("pair", [(None, 20), (3, 20)])
def test_an_engine_that_was_away_begins_anew(pair):
    """Its counters stand for another life."""
    assert looks((7, 10), (7, 20), pair, (7, 20), (7, 20))[2:] == [0, 0, 0]


def test_instances_that_are_gone_are_forgotten():
    """One that comes back under the name is another one."""
    inflow = KvInflow()
    for _ in range(3):
        inflow.missing_legs(D, 7, 1)
    inflow.keep(frozenset())

    assert inflow.missing_legs(D, 7, 2) == 0


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.sampled_from([-0.9, -0.1, 0.1, 0.9]), st.booleans()), min_size=1, max_size=30
    )
)
def test_no_engine_that_got_its_cache_is_accused(legs):
    """Whether it counts a little before or after we see its answer begin; and each dry leg is told at most once."""
    times = sorted(time for time, _, _ in legs)
    inflow = KvInflow()
    told = 0
    dry = sum(not arrived for _, _, arrived in legs)
    for now in range(110):
        counted = sum(16 for time, off, arrived in legs if arrived and time + off <= now)
        promised = sum(time <= now for time in times)
        told += inflow.missing_legs(D, counted, promised)

    assert told <= dry
