"""What was seen of pairs of engines, of as many as were used lately."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.peer_metrics import PairFailure
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.features.pairs.core.pair_health import PairHealth
from pdrelay_proxy.features.pairs.core.pair_matrix import PairMatrix
from pdrelay_proxy.features.pairs.core.pair_modes import PairModes
from pdrelay_proxy.features.pairs.core.pair_rows import pair_rows, worst_rows

A = ("p0", "d0")
B = ("p0", "d1")
C = ("p1", "d0")


def test_a_pair_is_counted():
    """Its requests, its first tokens, and its failures by kind."""
    matrix = PairMatrix(8)
    matrix.used(A, 0.1, 1.0, 1.0)
    matrix.used(A, 0.2, 2.0, 2.0)
    matrix.used(A, None, 3.0, 3.0)
    matrix.failed(A, "http_5xx", 4.0)
    row = next(pair_rows(matrix, PairHealth(), PairModes(), lambda _: None, now=6.0))

    assert (row.prefill, row.decode, row.handovers, row.failed, row.failures) == ("p0", "d0", 3, 1, {"http_5xx": 1})
    assert (row.state, row.reason, row.rest_s, row.last_s) == ("well", None, None, 2.0)
    assert 0.1 < row.ttft_s < 0.2


def test_nothing_is_kept_if_nothing_is_wanted():
    """The setting that turns it off."""
    matrix = PairMatrix(0)
    matrix.failed(A, "timeout", 1.0)

    assert len(matrix) == matrix.dropped == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))), st.integers(1, 12))
def test_those_that_were_used_last_are_kept(uses, most):
    """With thousands of engines there are millions of pairs."""
    matrix = PairMatrix(most)
    for now, (p, d) in enumerate(uses):
        matrix.used((f"p{p}", f"d{d}"), None, float(now), float(now))

    latest = list(dict.fromkeys((f"p{p}", f"d{d}") for p, d in reversed(uses)))
    kept = [pair for pair, _ in matrix.latest()]
    assert kept == latest[: len(kept)]
    assert min(len(latest), most - most // 8) <= len(kept) <= most
    assert matrix.dropped >= len(latest) - len(kept)


def test_pairs_of_engines_that_left_are_forgotten():
    """Ids are never used again."""
    matrix = PairMatrix(8)
    for pair in (A, B, C):
        matrix.used(pair, None, 1.0, 1.0)
    matrix.keep(frozenset({"p0", "d0"}))

    assert [pair for pair, _ in matrix.latest()] == [A]


def test_engines_that_work_with_others_are_known():
    """Only then is it the pair that fails."""
    matrix = PairMatrix(8)
    matrix.used(A, None, 9.0, 9.0)
    matrix.used(B, None, 1.0, 1.0)
    matrix.used(C, None, 5.0, 5.0)

    assert matrix.works_elsewhere(A, 1.0)
    assert not matrix.works_elsewhere(A, 2.0)  # p0 has served with none but d0 since then
    matrix.failed(B, "timeout", 7.0)
    assert not matrix.works_elsewhere(A, 2.0)


def test_a_request_that_began_before_an_engine_broke_shows_nothing():
    """An engine that answers 500 to all finishes its streams: its pairs were not to blame, and none of them rests."""
    matrix = PairMatrix(8)
    for pair in (B, C):
        matrix.used(pair, None, 9.0, 9.0)
    assert matrix.works_elsewhere(A, 8.0)

    for pair in (B, C):
        matrix.used(pair, None, 20.0, 2.0)
    assert not matrix.works_elsewhere(A, 10.0)
    assert matrix.works_elsewhere(A, 8.0)  # what was seen before still holds


def test_pairs_that_fail_are_shown_first():
    """Nobody looks through a thousand rows."""
    matrix = PairMatrix(8)
    health = PairHealth()
    for now, pair in enumerate((A, B, C, ("p1", "d1"), ("p2", "d2"))):
        matrix.used(pair, None, float(now), float(now))
    matrix.failed(B, "timeout", 6.0)
    health.failed(A, PairFailure.REFUSED, 3, now=5.0)
    health.failed(("p9", "d9"), PairFailure.TRANSFER, 1, now=5.0)
    rows = worst_rows(matrix, health, PairModes(), lambda _: None, 5, now=10.0)

    assert [(row.prefill, row.decode, row.state) for row in rows] == [
        ("p0", "d0", "resting"), ("p9", "d9", "failing"), ("p0", "d1", "well"), ("p2", "d2", "well"),
        ("p1", "d1", "well"),
    ]  # fmt: skip
    assert (rows[0].reason, rows[0].failed_in_a_row, rows[0].rest_s) == ("refused", 3, 25.0)
    assert rows[1].last_s is None


@pytest.mark.parametrize("role", Role)
def test_a_pair_is_as_well_as_its_engines(role):
    """It would be well with an engine that was killed, for what became of it before counts no more."""
    registry = Registry()
    matrix = PairMatrix(4)
    pair = tuple(registry.add(each, Address("http", "h", 1)).id for each in Role)
    matrix.used(pair, 0.5, 5.0, 5.0)
    member = registry.member(pair[0] if role is Role.PREFILL else pair[1])

    def shown():
        (row,) = pair_rows(matrix, PairHealth(), PairModes(), registry.get, now=6.0)
        return row.state, row.reason

    member.life.seen(now=5.0)
    assert shown() == ("well", None)
    for _ in range(2):
        member.life.missed("cannot be reached", now=6.0)
    assert shown() == ("ejected", f"{role}-0: cannot be reached")
    member.life.seen(now=7.0)
    assert shown() == ("well", None)
    registry.departures.drain(member.instance.id, now=8.0)
    assert shown() == ("draining", f"{role}-0: is to be drained")
