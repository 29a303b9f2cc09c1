"""What is read in an engine's metrics."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.engine_metrics import Numbers, incompatible_peers, read, received, shown_load
from pdrelay_proxy.core.protocol.push import EngineMode

OUR_CONNECTOR = EngineCapabilities(connector="pdrelay")
OURS = b"""# HELP vllm:pdrelay_leases_held Requests whose blocks are kept.
# TYPE vllm:pdrelay_leases_held gauge
vllm:pdrelay_leases_held{engine="0",model_name="m"} 2.0
vllm:pdrelay_leases_held{engine="1",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.125
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.0
"""
STOCK = b'vllm:kv_cache_usage_perc{engine="0"} 1.5e-2\nvllm:nixl_num_failed_transfers_total{engine="0"} 0.0\n'


@pytest.mark.parametrize(
    ("text", "rank", "numbers", "kept"),
    [
        (OURS, None, Numbers(OUR_CONNECTOR, 5, 0.125), 5),
        (OURS, 1, Numbers(OUR_CONNECTOR, 3, 0.0), 3),
        (STOCK, None, Numbers(EngineCapabilities(connector="nixl"), None, 0.015), 0.015),
        (
            b'vllm:nixl_num_failed_transfers_total{engine="0"} 0.0\n' + OURS,
            None,
            Numbers(OUR_CONNECTOR, 5, 0.125),
            5,
        ),
        (b"", None, Numbers(EngineCapabilities()), None),
        (b"vllm:kv_cache_usage_perc 0\n", 3, Numbers(EngineCapabilities(), kv_usage=0), 0),
        (b"vllm:kv_cache_usage_perc{} 1e+e\n", None, Numbers(EngineCapabilities(), kv_usage=1), 1),
    ],
)
def test_leases_count_before_the_use_of_the_cache(text, rank, numbers, kept):
    """Ours counts leases; stock engines show only how full their cache is."""
    found = read(text, rank)

    assert (found, found.kept) == (numbers, kept)


INFO = (
    b'vllm:pdrelay_connector_info{engine="%d",fingerprint="0123456789abcde%d",mode="%b",model_name="m",protocol="4"} '
    b"1.0\n"
)


def ours(protocol, fingerprint, mode=None):
    return EngineCapabilities(connector="pdrelay", protocol=protocol, fingerprint=fingerprint, mode=mode)


def test_our_connector_says_whom_it_understands():
    """From its start, and whatever order the labels have."""
    text = OURS + INFO % (0, 0, b"pull") + INFO % (1, 1, b"push")

    assert read(text) == Numbers(ours("4", "0123456789abcde0", EngineMode.PULL), 5, 0.125)
    assert read(text, 1) == Numbers(ours("4", "0123456789abcde1", EngineMode.PUSH), 3, 0.0)
    assert read(b'vllm:pdrelay_connector_info{protocol="4",fingerprint="0123456789abcdef"} 1\n') == Numbers(
        ours("4", "0123456789abcdef")
    )
    assert read(b'vllm:pdrelay_connector_info{protocol="4"} 0\n').facts.protocol is None


def test_engines_that_differ_are_known_by_their_ids():
    """Data-parallel ranks have one each, behind the engine's own."""
    info = b'vllm:pdrelay_connector_info{engine="0",engine_id="1b-2c",fingerprint="0",mode="pull",protocol="4"} 1.0\n'
    line = b'vllm:pdrelay_incompatible_peer{engine="%d",model_name="m",peer="%b"} 1.0\n'
    text = info + line % (0, b"1b-2c_dp1") + line % (0, b"3d") + line % (1, b"4e")

    assert read(text).facts.engine_id == "1b-2c"
    assert incompatible_peers(text) == {"1b-2c", "3d", "4e"}
    assert incompatible_peers(text, 1) == {"4e"}
    assert incompatible_peers(info) == frozenset()


@given(st.binary(max_size=300))
def test_any_text_can_be_read(text):
    """It comes from outside."""
    read(b"vllm:pdrelay_leases_held " + text)


@pytest.mark.parametrize("read_it", [read, incompatible_peers, received])
@pytest.mark.parametrize(
    "name",
    ["pdrelay_connector_info{", "pdrelay_incompatible_peer{", 'prompt_tokens_by_source_total{source="local_cache_hit"'],
)
def test_a_text_of_one_long_line_holds_nothing_up(read_it, name):
    """It is read on the event loop. An engine may be anything that answers, and answers may have 8 MiB."""
    began = time.thread_time()
    read_it(f"vllm:{name}".encode() * 20_000)

    assert time.thread_time() - began < 1.0  # s; it took minutes


def test_a_text_of_lines_without_end_is_read_as_far_as_an_engine_writes():
    """Each line of 8 MiB was matched: 0.3 s of every 15, for one engine. One with 999 ranks has as many lines."""
    text = b"\nvllm:num_requests_running 1" * 9000 + b"\nvllm:pdrelay_leases_held 1" * 9000

    assert shown_load(text, now=0.0).requests == 4096
    assert read(text).leases == 4096
