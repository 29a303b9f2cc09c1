"""What is read in the metrics of an engine, as vLLM writes them."""

from pdrelay_proxy.features.roles.engine_totals import engine_totals
from support.fluid_fleet import FluidFleet

RANKS = b"""
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.125
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 1.2e+03
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 40.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_compute"} 50.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="external_kv_transfer"} 900.0
vllm:request_prompt_tokens_count{engine="1",model_name="m"} 9.0
vllm:request_prompt_tokens_sum{engine="1",model_name="m"} 999.0
vllm:inter_token_latency_seconds_sum{engine="1",model_name="m"} 1.5
vllm:inter_token_latency_seconds_count{engine="1",model_name="m"} 30.0
vllm:request_prefill_time_seconds_sum{engine="1",model_name="m"} 4.5
vllm:iteration_tokens_total_count{engine="1",model_name="m"} 60.0
"""


def test_the_ranks_of_an_engine_add_up():
    """One that is known as a whole is as busy as its ranks together; its fullest cache decides."""
    found = engine_totals(RANKS, now=5.0)

    assert (found.at, found.running, found.waiting, found.kv_usage) == (5.0, 5.0, 4.0, 0.5)
    assert (found.computed_tokens, found.prompts, found.itl_sum_s, found.itl_count) == (90.0, 9.0, 1.5, 30.0)
    assert (found.prefill_s, found.steps) == (4.5, 60.0)


def test_a_rank_has_its_own_numbers():
    """Ranks are engines of their own, behind one address."""
    found = engine_totals(RANKS, 0, now=5.0)

    assert (found.running, found.waiting, found.kv_usage, found.computed_tokens) == (2.0, 0.0, 0.125, 40.0)
    assert (found.prefill_s, found.steps) == (None, None)


def test_an_older_engine_counts_all_its_prompt_tokens():
    """Without prompt_tokens_by_source_total its caches do not show: it counts as busier than it is, and never less."""
    found = engine_totals(b"\n".join(line for line in RANKS.splitlines() if b"by_source" not in line), now=5.0)

    assert found.computed_tokens == 1300.0


def test_what_is_no_engine_of_vllm_says_nothing():
    """An engine whose metrics are closed must not count as idle."""
    assert engine_totals(b"", now=5.0) is None
    assert engine_totals(b'vllm:num_requests_running{engine="0"} NaN\n', now=5.0) is None


def test_lines_without_end_are_read_as_far_as_an_engine_writes():
    """It is read on the event loop, and may be anything that answers."""
    assert engine_totals(b"\nvllm:num_requests_running 1" * 9000, now=5.0).running == 4096


def test_what_a_fleet_writes_is_what_is_read():
    """The tests of whole routers rely on it."""
    fleet = FluidFleet(1, 1)
    fleet.step(0.5, 0.5)

    for reading in fleet.readings():
        assert engine_totals(fleet.exposition(reading.name), 0, now=fleet.now) == reading.totals
