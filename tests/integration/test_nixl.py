"""Real NIXL agents in real processes on loopback: the bytes, and what becomes of them when a peer dies or hangs."""

import random
import time

import pytest

from support.nixl_process import ALL, BIG, SHORT, TIMEOUT, same
from support.sim import until

pytestmark = pytest.mark.nixl


def test_bytes_arrive_bit_exact_wherever_the_blocks_lie(start):
    """One run, scattered, backwards, one block and all of them: and nothing beside them is touched."""
    p, d = start("p", "d")
    p.ask("fill", seed=1)
    choose = random.Random(7)
    cases = [([3, 4, 5, 6], [10, 11, 12, 13]), ([9], [1]), (ALL, ALL[::-1]), (ALL, ALL)]
    cases += [(choose.sample(ALL, n), choose.sample(ALL, n)) for n in (2, 5, 17, 40)]
    p.ask("lend", requests=[f"r{number}" for number in range(len(cases))])
    for number, (blocks, into) in enumerate(cases):
        d.ask("fill", seed=100 + number)
        others = [block for block in ALL if block not in into]
        before = d.ask("digests", blocks=others)
        d.load(f"r{number}", p, blocks, into)

        assert d.result(f"r{number}").failure == ""
        assert same(p, blocks, d, into)
        assert d.ask("digests", blocks=others) == before


def test_a_peer_killed_during_a_read_fails_it_at_once(start):
    """What it has sent until then is not taken for the whole, and nothing comes after it."""
    p, d = start("p", "d", block_bytes=BIG)
    while (failed := killed_in_the_middle(p, d)) is None:
        (p,) = start("p-once-more", block_bytes=BIG)
    if failed.quarantined:
        d.released("a")
    d.ask("paint", blocks=ALL, value=7)
    painted = d.ask("digests", blocks=ALL)
    time.sleep(0.5)
    (again,) = start("p-again", port=p.port, block_bytes=BIG)
    again.ask("lend", requests=["b"])
    d.load("b", again, [1], [1])

    assert failed.failure != f"not loaded within {TIMEOUT:g} s"
    assert d.result("b").failure == ""
    assert d.ask("digests", blocks=ALL[2:])["digests"] == painted["digests"][2:]


def killed_in_the_middle(p, d):
    """Kill P while D reads, and return what becomes of the read.

    None: this process got a core too late, and D had it all before.
    """
    p.ask("fill", seed=1)
    p.ask("lend", requests=["warm", "a"])
    d.load("warm", p, [1], [1])
    d.result("warm")
    whole = p.ask("digests", blocks=ALL)
    before = d.digest(2)
    d.load("a", p, ALL, ALL)
    d.wait_written(2, before)
    p.kill()
    failed = d.result("a")
    if failed.failure:
        return failed
    assert d.ask("digests", blocks=ALL) == whole
    d.forget("a", "warm")
    d.ask("fill", seed=2)
    return None


def test_late_bytes_of_a_hung_peer_reach_quarantined_blocks_only(start):
    """The load fails in time, but NIXL cannot be stopped: the rest arrives when the peer goes on, minutes later."""
    p, d = start("p", "d", block_bytes=BIG, timeout=SHORT)
    p.ask("lend", requests=["warm", "a", "b"])
    d.load("warm", p, [1], [1])
    d.result("warm")
    p.freeze()
    d.load("a", p, ALL[:32], ALL[:32])
    failed = d.result("a")
    assert failed.failure == f"not loaded within {SHORT:g} s"
    assert failed.seconds >= SHORT  # and before P goes on
    d.ask("paint", blocks=ALL[32:], value=7)
    others = d.ask("digests", blocks=ALL[32:])
    time.sleep(1)
    assert d.quarantined("a")
    p.thaw()
    d.released("a")
    d.ask("paint", blocks=ALL[:32], value=7)
    free = d.ask("digests", blocks=ALL[:32])
    time.sleep(1)

    assert d.ask("digests", blocks=ALL[:32]) == free
    assert d.ask("digests", blocks=ALL[32:]) == others
    d.load("b", p, ALL[:4], ALL[:4])
    assert d.result("b").failure == ""
    assert same(p, ALL[:4], d, ALL[:4])


@pytest.mark.slow  # processes import NIXL again and again
def test_engines_come_and_go_without_leaving_anything_open(start):
    """A decode engine outlives many prefill engines."""
    (d,) = start("d")
    before = d.ask("files")
    for number in range(3):
        (p,) = start(f"p{number}")
        p.ask("lend", requests=[f"r{number}"])
        d.load(f"r{number}", p, [1], [1])
        assert d.result(f"r{number}").failure == ""
        assert d.ask("files") != before
        p.kill()
        until(lambda: d.ask("files") == before)
