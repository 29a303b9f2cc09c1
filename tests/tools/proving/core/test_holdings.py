"""What engines hold is read from their metrics, whatever these are."""

import pytest

from pdrelay_tools.proving.core.holdings import read_holdings

IDLE = """# HELP vllm:kv_cache_usage_perc KV-cache usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="1000"} 1.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 99.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 1.0
vllm:pdrelay_leases_held{engine="0"} 0.0
"""


def test_an_engine_at_rest_holds_nothing():
    seen = read_holdings(IDLE)

    assert seen.beyond(None) == ""
    assert (seen.block_size, seen.blocks, seen.loaded) == (32, 1000, 99.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0', "1.00% of its KV cache (10 blocks)"),
        ('vllm:pdrelay_leases_held{engine="0"} 0.0', "0.01 leases held"),
        ('vllm:num_requests_running{engine="0",model_name="m"} 0.0', "0.01 running or waiting requests"),
    ],
)
def test_what_is_held_is_named(line, said):
    """Each of vLLM's gauges and of pdrelay's tables."""
    assert read_holdings(IDLE.replace(line, f"{line[:-3]}0.01")).beyond(None) == said


def test_what_was_held_before_is_usual():
    """A leak of an earlier check is found once."""
    leaked = read_holdings(IDLE.replace('leases_held{engine="0"} 0.0', 'leases_held{engine="0"} 2.0'))

    assert leaked.beyond(None) == "2 leases held"
    assert leaked.beyond(leaked) == ""


def test_ranks_are_added_up():
    """The fullest rank counts, and the requests of all of them."""
    second = IDLE.replace('engine="0"', 'engine="1"').replace('"m"} 0.0', '"m"} 0.5')

    seen = read_holdings(IDLE + second)

    assert (seen.usage, seen.requests, seen.loaded) == (0.5, 0.5, 198.0)


@pytest.mark.parametrize("text", ["", "<html>", "vllm:kv_cache_usage_perc x", "python_gc 1\n" * 3])
def test_other_texts_are_no_metrics_of_an_engine(text):
    assert read_holdings(text) is None


@pytest.mark.parametrize("value", ["NaN", "nan", "+Inf", "inf", "1e999"])
def test_what_is_no_number_is_no_gauge(value):
    """NaN is more than nothing in no comparison, and an infinite cache has no blocks to count."""
    assert read_holdings(IDLE.replace('"m"} 0.0', f'"m"}} {value}')) is None
    assert read_holdings(IDLE.replace('leases_held{engine="0"} 0.0', f'leases_held{{engine="0"}} {value}')) is None
    assert read_holdings(IDLE.replace("99.0", value)).loaded is None
