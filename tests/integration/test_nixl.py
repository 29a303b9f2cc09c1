"""Real NIXL agents in real processes on loopback: the bytes, and what becomes of them when a peer dies or hangs."""

import random
import time

import pytest

from support.nixl_process import ALL, BIG, IDLE, TIMEOUT, same

pytestmark = pytest.mark.nixl


def is_alive(process):
    """Ask its threads whether they live; a dead one raises there, and nothing comes back."""
    return process.ask("threads")["threads"]


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


def test_threads_sleep_when_nothing_moves(start):
    """nixl's own default is a whole core per engine, idle or not."""
    p, d = start("p", "d")
    before = [p.cpu(1), d.cpu(1)]
    p.ask("lend", requests=["a"])
    d.load("a", p, ALL, ALL)
    assert d.result("a").failure == ""
    after = [p.cpu(1), d.cpu(1)]

    assert max(before + after) < IDLE


def test_a_peer_killed_before_a_read_fails_it_at_once(start):
    """And the thread goes on to its successor on the same port."""
    p, d = start("p", "d")
    p.ask("lend", requests=["a", "b"])
    d.load("a", p, [1], [1])
    assert d.result("a").failure == ""
    p.kill()
    d.load("b", p, [1], [1])
    failed = d.result("b")
    (again,) = start("p-again", port=p.port)
    again.ask("fill", seed=2)
    again.ask("lend", requests=["c"])
    d.load("c", again, ALL, ALL)

    assert failed.failure
    assert failed.seconds < TIMEOUT / 2
    assert d.result("c").failure == ""
    assert same(again, ALL, d, ALL)
    assert is_alive(d)


def test_a_peer_killed_during_a_read_fails_it_at_once(start):
    """What it has sent until then is not taken for the whole, and nothing comes after it."""
    p, d = start("p", "d", block_bytes=BIG)
    p.ask("lend", requests=["warm", "a"])
    d.load("warm", p, [1], [1])
    d.result("warm")
    d.load("a", p, ALL, ALL)
    time.sleep(0.02)
    p.kill()
    failed = d.result("a")
    if failed.quarantined:
        d.released("a")
    d.ask("paint", blocks=ALL, value=7)
    painted = d.ask("digests", blocks=ALL)
    time.sleep(0.5)
    (again,) = start("p-again", port=p.port, block_bytes=BIG)
    again.ask("lend", requests=["b"])
    d.load("b", again, [1], [1])

    assert failed.failure
    assert failed.seconds < TIMEOUT / 2
    assert d.result("b").failure == ""
    assert d.ask("digests", blocks=ALL[2:])["digests"] == painted["digests"][2:]


def test_late_bytes_of_a_hung_peer_reach_quarantined_blocks_only(start):
    """The load fails in time, but NIXL cannot be stopped: the rest arrives when the peer goes on, minutes later."""
    p, d = start("p", "d", block_bytes=BIG)
    p.ask("lend", requests=["warm", "a", "b"])
    d.load("warm", p, [1], [1])
    d.result("warm")
    p.freeze()
    d.load("a", p, ALL[:32], ALL[:32])
    failed = d.result("a")
    assert failed.failure == f"not loaded within {TIMEOUT:g} s"
    assert TIMEOUT <= failed.seconds < TIMEOUT + 1
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


def test_a_hung_peer_that_dies_lets_go(start):
    """Its blocks come back without anybody restarting the decode engine."""
    p, d = start("p", "d", block_bytes=BIG)
    p.ask("lend", requests=["warm", "a"])
    d.load("warm", p, [1], [1])
    d.result("warm")
    p.freeze()
    d.load("a", p, ALL, ALL)
    assert d.result("a").quarantined
    p.kill()
    d.released("a")

    assert is_alive(d)
    assert d.cpu(1) < IDLE


def test_peers_with_a_slow_handshake_are_connected_in_parallel(start):
    """Eight new prefill engines that take 1 s each cost the first eight requests 1 s, not 8."""
    (d,) = start("d")
    (p,) = start("p", delay=1.0, copies=8)
    p.ask("fill", seed=3)
    p.ask("lend", requests=[f"r{copy}" for copy in range(8)])
    for copy in range(8):
        d.load(f"r{copy}", p, [ALL[copy]], [ALL[copy]], copy=copy)
    results = [d.result(f"r{copy}") for copy in range(8)]

    assert [result.failure for result in results] == [""] * 8
    assert max(result.seconds for result in results) < 1.9
    assert same(p, ALL[:8], d, ALL[:8])


def test_engines_come_and_go_without_leaving_anything_open(start):
    """A decode engine outlives many prefill engines."""
    (d,) = start("d")
    files = []
    for number in range(3):
        (p,) = start(f"p{number}")
        p.ask("lend", requests=[f"r{number}"])
        d.load(f"r{number}", p, [1], [1])
        assert d.result(f"r{number}").failure == ""
        p.kill()
        time.sleep(0.3)
        files.append(d.ask("files")["files"])

    assert files[2] == files[0]
