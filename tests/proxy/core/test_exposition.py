"""What is read in an engine's metrics."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_proxy.core.exposition import Numbers, read

OURS = b"""# HELP vllm:xpyd_leases_held Requests whose blocks are kept.
# TYPE vllm:xpyd_leases_held gauge
vllm:xpyd_leases_held{engine="0",model_name="m"} 2.0
vllm:xpyd_leases_held{engine="1",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.125
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.0
"""
STOCK = b'vllm:kv_cache_usage_perc{engine="0"} 1.5e-2\nvllm:nixl_num_failed_transfers_total{engine="0"} 0.0\n'


@pytest.mark.parametrize(
    ("text", "rank", "numbers", "kept"),
    [
        (OURS, None, Numbers("xpyd", 5, 0.125), 5),
        (OURS, 1, Numbers("xpyd", 3, 0.0), 3),
        (STOCK, None, Numbers("nixl", None, 0.015), 0.015),
        (b"", None, Numbers(), None),
        (b"vllm:kv_cache_usage_perc 0\n", 3, Numbers(kv_usage=0), 0),
        (b"vllm:kv_cache_usage_perc{} 1e+e\n", None, Numbers(kv_usage=1), 1),
    ],
)
def test_leases_count_before_the_use_of_the_cache(text, rank, numbers, kept):
    """Ours counts leases; stock engines show only how full their cache is."""
    found = read(text, rank)

    assert (found, found.kept) == (numbers, kept)


@given(st.binary(max_size=300))
def test_any_text_can_be_read(text):
    """It comes from outside."""
    read(b"vllm:xpyd_leases_held " + text)
