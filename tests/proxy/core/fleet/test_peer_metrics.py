"""What our connector shows of an engine's transfers with others, read as text of strangers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.pair_history import PairTrouble
from pdrelay_proxy.core.fleet.peer_metrics import read_failures, read_moved, read_totals


def loads(*lines):
    text = "# TYPE vllm:pdrelay_peer_loads_total counter\n"
    for peer, outcome, count, *engine in lines:
        labels = f'engine="{engine[0] if engine else 0}",model_name="m",outcome="{outcome}",peer="{peer}"'
        text += f"vllm:pdrelay_peer_loads_total{{{labels}}} {count}\n"
    return text.encode()


def test_loads_are_read_by_engine_and_outcome():
    """As prometheus_client writes them."""
    text = loads(("p", "handshake", "2.0"), ("p", "loaded", "1e+06"), ("q_dp1", "transfer", "3.0"))

    assert read_totals(text) == {("p", "handshake"): 2, ("p", "loaded"): 10**6, ("q_dp1", "transfer"): 3}


def test_ranks_are_told_apart():
    """Each is a decode engine of its own, and a router that knows one engine adds them up."""
    text = loads(("p", "handshake", "2.0", 0), ("p", "handshake", "5.0", 1))

    assert read_totals(text, 1) == {("p", "handshake"): 5}
    assert read_totals(text) == {("p", "handshake"): 7}


@pytest.mark.parametrize("line", [("p", "handshake", "-1"), ("p", "x" * 200, "1"), ('a" b', "loaded", "1"),
                                  ("p", "handshake", "NaN"), ("p", "handshake", "1" * 30)])  # fmt: skip
def test_what_is_no_line_of_loads_is_left_out(line):
    """An engine may be anything that answers."""
    assert read_totals(loads(line)) == {}


def test_lines_are_bounded():
    """An engine cannot make the router remember without end."""
    assert len(read_totals(loads(*((f"p{n}", "handshake", "1") for n in range(2000))))) <= 512


@given(st.binary(max_size=300))
def test_no_text_is_too_odd(noise):
    """Nothing raises."""
    read_moved(b"\nvllm:pdrelay_peer_bytes_total{" + noise)
    read_totals(b"\nvllm:pdrelay_peer_loads_total{" + noise)
    read_failures(b"\nvllm:pdrelay_peer_failure{" + noise + b"} 1.0\n")


def failure(why, outcome="secret", peer="p", engine=0, value="1.0"):
    labels = f'engine="{engine}",model_name="m",outcome="{outcome}",peer="{peer}",reason="{why}"'
    return f"# TYPE vllm:pdrelay_peer_failure gauge\nvllm:pdrelay_peer_failure{{{labels}}} {value}\n".encode()


def test_the_reason_of_a_failure_is_read_in_its_words():
    """As our connector writes it: printable, and without what the text format escapes."""
    why = "10.0.0.1:5600 was not met: its weights are 'a{1}', ours are 'b'; they must be equal, peer=x"

    assert read_failures(failure(why)) == {"p": PairTrouble("secret", why, lasts=True)}
    assert read_failures(failure(why, engine=1), 0) == {}
    assert read_failures(failure(why, value="0.0")) == read_failures(failure(why, outcome="newer")) == {}


@pytest.mark.parametrize("why", ["a\x1b[31m", "\u00e9", "x" * 500, 'a\\"b'], ids=repr)
def test_a_reason_of_another_form_is_left_out(why):
    """It goes into the log, and to terminals. That the pair fails, and how, is known all the same."""
    assert read_failures(failure(why)) == {"p": PairTrouble("secret", "", lasts=True)}


def moved(*lines):
    text = "# HELP of vLLM\n"
    for peer, moved, seconds, *engine in lines:
        labels = f'engine="{engine[0] if engine else 0}",model_name="m",peer="{peer}"'
        text += f"vllm:pdrelay_peer_bytes_total{{{labels}}} {moved}\n"
        text += f"vllm:pdrelay_peer_transfer_seconds_total{{{labels}}} {seconds}\n"
    return text.encode()


def test_bytes_and_seconds_are_read_by_engine():
    """As prometheus_client writes them; ranks are told apart, or added up where the router knows one engine."""
    text = moved(("p", "1e+06", "0.5"), ("q_dp1", "3.0", "4e-05"), ("p", "2.0", "1.5", 1))

    assert read_moved(text) == {"p": (1_000_002.0, 2.0), "q_dp1": (3.0, 4e-5)}
    assert read_moved(text, 1) == {"p": (2.0, 1.5)}


@pytest.mark.parametrize("line", [("p", "-1", "1"), ("p", "NaN", "1"), ("p", "1", "Inf"), ("p" * 200, "1", "1"),
                                  ('a" b', "1", "1"), ("p", "1" * 30, "1")])  # fmt: skip
def test_what_is_no_line_of_bytes_is_left_out(line):
    """An engine may be anything that answers."""
    assert read_moved(moved(line)) == {}
