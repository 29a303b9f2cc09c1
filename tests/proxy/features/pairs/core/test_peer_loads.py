"""What is new in what decode engines show of their loads."""

from pdrelay_proxy.core.fleet.peer_metrics import PairFailure
from pdrelay_proxy.features.pairs.core.peer_loads import PeerLoads


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
