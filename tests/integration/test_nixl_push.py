"""Push with real NIXL agents in real processes over TCP: the bytes, and what becomes of them when somebody fails."""

import random
import time

import pytest

from support.nixl_process import ALL, BIG, BLOCKS, SHORT, same

pytestmark = pytest.mark.nixl
MODE = "push"


def warm(p, d):
    """Let them meet, so that what follows is not a first contact."""
    d.expect("warm", p, [1])
    p.push("warm", [1])
    assert d.result("warm").failure == ""


def begin(p, d, blocks):
    """Have P write into these blocks, and return when some bytes are there. They are never all of the push.

    However late this process gets a core for what it does next, it does it in the middle.
    """
    before = d.digest(blocks[1])
    d.expect("a", p, blocks)
    p.push("a", blocks, last=False)
    d.wait_written(blocks[1], before)


def test_what_has_landed_is_there_bit_exact(start):
    """In one piece or streamed, whichever comes first, wherever the blocks lie: and nothing beside them is touched.

    The digests are taken at once: what NIXL calls done is in D's memory, not merely sent.
    """
    p, d = start("p", "d", block_bytes=1 << 17)
    p.ask("fill", seed=1)
    choose = random.Random(7)
    for number, size in enumerate((1, 2, 5, 17, 40, BLOCKS)):
        d.ask("fill", seed=100 + number)
        blocks, into = choose.sample(ALL, size), choose.sample(ALL, size)
        first = choose.randrange(size)  # D has that many blocks in its own cache
        others = [block for block in ALL if block not in into[first:]]
        before = d.ask("digests", blocks=others)
        cut = choose.randrange(size + 1)
        if number % 2:
            d.expect(f"r{number}", p, into[first:], first=first)
        if cut:
            p.push(f"r{number}", blocks[:cut], last=False)
        if number % 2 == 0:
            d.expect(f"r{number}", p, into[first:], first=first)
        p.push(f"r{number}", blocks[cut:])

        assert d.result(f"r{number}").failure == ""
        assert same(p, blocks[first:], d, into[first:])
        assert d.ask("digests", blocks=others) == before


@pytest.mark.slow  # two processes import NIXL; the rule is told in connector/core/push
def test_a_second_attempt_overwrites_the_first(start):
    """A preempted prefill starts again in other blocks; what counts is what its last attempt computed."""
    p, d = start("p", "d")
    p.ask("fill", seed=1)
    d.expect("r", p, ALL[:8])
    p.push("r", ALL[:6], last=False)
    p.push("r", ALL[20:24], last=False, attempt=1)
    p.push("r", ALL[24:28], attempt=1)

    assert d.result("r").failure == ""
    assert same(p, ALL[20:28], d, ALL[:8])


def test_nothing_lands_after_an_aborted_push_has_let_go(start):
    """D aborts in the middle of a push: its blocks stay out of reach until P has stopped, and then nobody writes."""
    p, d = start("p", "d", block_bytes=BIG)
    p.ask("fill", seed=1)
    warm(p, d)
    begin(p, d, ALL)
    d.ask("abort", request="a")
    d.released("a")
    d.ask("paint", blocks=ALL, value=7)
    painted = d.ask("digests", blocks=ALL)
    time.sleep(1)

    assert d.result("a").quarantined
    assert d.ask("digests", blocks=ALL) == painted


def test_a_writer_killed_in_the_middle(start):
    """D learns of it at once, waits until what was on its way has arrived, and meets the successor."""
    p, d = start("p", "d", block_bytes=BIG)
    p.ask("fill", seed=1)
    warm(p, d)
    begin(p, d, ALL)
    p.kill()
    failed = d.result("a")
    d.released("a")
    d.ask("paint", blocks=ALL, value=7)
    painted = d.ask("digests", blocks=ALL)
    time.sleep(0.5)
    assert d.ask("digests", blocks=ALL) == painted
    (again,) = start("p-again", port=p.port, block_bytes=BIG)
    again.ask("fill", seed=2)
    d.expect("b", again, ALL)
    again.push("b", ALL)

    assert "is gone" in failed.failure  # its connection says so, before its silence does
    assert d.result("b").failure == ""
    assert same(again, ALL, d, ALL)


@pytest.mark.slow  # two processes import NIXL; the rule is told in connector/core/push
def test_a_writer_that_hangs(start):
    """Its silence fails the request in time; its blocks come back when it goes on and says that it has stopped."""
    p, d = start("p", "d", block_bytes=BIG, timeout=SHORT)
    p.ask("fill", seed=1)
    warm(p, d)
    begin(p, d, ALL[:32])
    p.freeze()
    failed = d.result("a")
    d.ask("paint", blocks=ALL[32:], value=7)
    others = d.ask("digests", blocks=ALL[32:])
    time.sleep(1)
    assert d.quarantined("a")
    p.thaw()
    d.released("a")
    d.ask("paint", blocks=ALL, value=7)
    painted = d.ask("digests", blocks=ALL)
    time.sleep(1)

    assert failed.failure.endswith("does not answer")
    assert d.ask("digests", blocks=ALL[32:]) == others == {"digests": painted["digests"][32:]}
    assert d.ask("digests", blocks=ALL) == painted
    warm_again = "b"
    d.expect(warm_again, p, ALL[:4])
    p.push(warm_again, ALL[4:8])
    assert d.result(warm_again).failure == ""
    assert same(p, ALL[4:8], d, ALL[:4])
