"""How fast KV moves between engines, read as text of strangers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.features.pairs.core.peer_rates import PeerRates, read_moved


def shown(*lines):
    text = "# HELP of vLLM\n"
    for peer, moved, seconds, *engine in lines:
        labels = f'engine="{engine[0] if engine else 0}",model_name="m",peer="{peer}"'
        text += f"vllm:pdrelay_peer_bytes_total{{{labels}}} {moved}\n"
        text += f"vllm:pdrelay_peer_transfer_seconds_total{{{labels}}} {seconds}\n"
    return text.encode()


def test_bytes_and_seconds_are_read_by_engine():
    """As prometheus_client writes them; ranks are told apart, or added up where the router knows one engine."""
    text = shown(("p", "1e+06", "0.5"), ("q_dp1", "3.0", "4e-05"), ("p", "2.0", "1.5", 1))

    assert read_moved(text) == {"p": (1_000_002.0, 2.0), "q_dp1": (3.0, 4e-5)}
    assert read_moved(text, 1) == {"p": (2.0, 1.5)}


@pytest.mark.parametrize("line", [("p", "-1", "1"), ("p", "NaN", "1"), ("p", "1", "Inf"), ("p" * 200, "1", "1"),
                                  ('a" b', "1", "1"), ("p", "1" * 30, "1")])  # fmt: skip
def test_what_is_no_such_line_is_left_out(line):
    """An engine may be anything that answers."""
    assert read_moved(shown(line)) == {}


@given(st.binary(max_size=300))
def test_no_text_is_too_odd(noise):
    """Nothing raises."""
    read_moved(b"\nvllm:pdrelay_peer_bytes_total{" + noise)


def test_the_rate_is_that_of_what_moved_since_the_last_look():
    """A link that has become slow must not hide behind what it was for days; an engine that began anew counts anew."""
    rates = PeerRates()
    seen = [
        rates.rates_of("d", {"p": moved}) for moved in ((9e9, 9.0), (9e9 + 1e6, 10.0), (9e9 + 1e6, 10.0), (5e6, 1.0))
    ]

    assert seen == [{"p": 1e9}, {"p": 1e6}, {}, {"p": 5e6}]
