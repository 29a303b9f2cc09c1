"""What decode engines show of their loads, read as text of strangers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.pair_history import PairTrouble
from pdrelay_proxy.features.pairs.core.pair_health import PairFailure
from pdrelay_proxy.features.pairs.core.peer_loads import PeerLoads, read_failures, read_totals


def shown(*lines):
    text = "# TYPE vllm:pdrelay_peer_loads_total counter\n"
    for peer, outcome, count, *engine in lines:
        labels = f'engine="{engine[0] if engine else 0}",model_name="m",outcome="{outcome}",peer="{peer}"'
        text += f"vllm:pdrelay_peer_loads_total{{{labels}}} {count}\n"
    return text.encode()


def test_loads_are_read_by_engine_and_outcome():
    """As prometheus_client writes them."""
    text = shown(("p", "handshake", "2.0"), ("p", "loaded", "1e+06"), ("q_dp1", "transfer", "3.0"))

    assert read_totals(text) == {("p", "handshake"): 2, ("p", "loaded"): 10**6, ("q_dp1", "transfer"): 3}


def test_ranks_are_told_apart():
    """Each is a decode engine of its own, and a router that knows one engine adds them up."""
    text = shown(("p", "handshake", "2.0", 0), ("p", "handshake", "5.0", 1))

    assert read_totals(text, 1) == {("p", "handshake"): 5}
    assert read_totals(text) == {("p", "handshake"): 7}


@pytest.mark.parametrize("line", [("p", "handshake", "-1"), ("p", "x" * 200, "1"), ('a" b', "loaded", "1"),
                                  ("p", "handshake", "NaN"), ("p", "handshake", "1" * 30)])  # fmt: skip
def test_what_is_no_such_line_is_left_out(line):
    """An engine may be anything that answers."""
    assert read_totals(shown(line)) == {}


def test_lines_are_bounded():
    """An engine cannot make the router remember without end."""
    assert len(read_totals(shown(*((f"p{n}", "handshake", "1") for n in range(2000))))) <= 512


@given(st.binary(max_size=300))
def test_no_text_is_too_odd(noise):
    """Nothing raises."""
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


def test_a_first_look_tells_nothing():
    """It may have failed days ago."""
    loads = PeerLoads()

    assert loads.news_of("d", {("p", "handshake"): 9}) == ([], False)


def test_what_is_new_is_told_by_engine():
    """With the reason that is the pair's own, of several the most frequent one."""
    loads = PeerLoads()
    loads.news_of("d", {("p", "loaded"): 4})
    totals = {("p", "loaded"): 6, ("p", "lease"): 9, ("q", "timeout"): 1, ("q", "transfer"): 2, ("r", "newer"): 1}
    (p, q, r), restarted = loads.news_of("d", totals)

    assert not restarted
    assert (p.peer, p.loaded, p.failed, p.worst, p.count) == ("p", 2, {PairFailure.LEASE: 9}, None, 0)
    assert (q.loaded, q.worst, q.count) == (0, PairFailure.TRANSFER, 3)
    assert (r.loaded, r.failed) == (0, {})
    assert loads.news_of("d", totals) == ([], False)


def test_an_engine_that_counts_from_zero_was_restarted():
    """What it shows next is compared with this."""
    loads = PeerLoads()
    loads.news_of("d", {("p", "handshake"): 9})

    assert loads.news_of("d", {}) == ([], True)
    (news,), _ = loads.news_of("d", {("p", "handshake"): 1})
    assert news.count == 1


def test_engines_that_left_are_forgotten():
    """They come and go."""
    loads = PeerLoads()
    loads.news_of("d", {("p", "handshake"): 9})
    loads.keep(frozenset())

    assert loads.news_of("d", {("p", "handshake"): 10}) == ([], False)
