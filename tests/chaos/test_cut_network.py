"""The network between P and D is cut, silently: P's blocks come back, nobody waits long, and no text is wrong.

HTTP goes another way (``support.netns``), as it would with a network of its own for KV.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.cluster import nothing_held, wait_until
from support.legs import decode, plain, prefill, prompt_of, text_of
from support.victims import (
    BLOCKS_HELD,
    BORROWING,
    EXPIRED,
    HELD,
    LATE,
    LEASE,
    LINGERING,
    LOADS,
    LONG,
    POLICIES,
    TIMEOUT,
    USAGE,
    check,
    queue_of,
    reuse_blocks,
    serves_on,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: both modes have the same leases."""
    return (test, params["mode"]) == ("test_cut_while_d_holds_20_leases", "push")


def test_cut_while_d_holds_20_leases(network, p, d, reference):
    """P frees when the lease is over and serves on; the link is back before D's queue moves, and no text is wrong."""
    expired = p.now(EXPIRED)
    loads = d.now(LOADS)
    with queue_of(20, p, d, first=400) as (prompts, answers, leave):
        wait_until(lambda: (p.now(HELD), p.now(BLOCKS_HELD)) == (20, 20 * 7), seconds=LONG, what="P holds all")
        assert p.now(USAGE) > 0
        network.cut()
        wait_until(lambda: nothing_held(p.spec), seconds=LEASE + LATE, what="P frees what D cannot renew")
        assert (p.now(HELD), p.now(BLOCKS_HELD), p.now(USAGE)) == (0, 0, 0)
        assert plain(p.spec, prompt_of(430)) == plain(reference, prompt_of(430))
        reuse_blocks(p)
        assert not any(answer.done() for answer in answers)
        network.heal()
        leave.set()
        texts = [text_of(answer.result()) for answer in answers]

    assert p.now(EXPIRED) == expired + 20
    assert texts == [plain(reference, prompt) for prompt in prompts]
    assert d.now(LOADS) == loads
    wait_until(lambda: loads_again(p, d, reference), seconds=LONG, what="D loads from P again")


def test_cut_in_the_middle_of_a_read(network, p, victims, reference):
    """transfer_timeout bounds it, by policy; P is free; a request that comes while the link is cut is served, too."""
    decoders = list(victims.hasty.values())
    prompts = [prompt_of(431, 900), prompt_of(432, 900)]
    for number, d in enumerate(decoders):  # they have met: the transfer begins at once
        warm = prompt_of(433 + number)
        assert text_of(decode(d.spec, warm, prefill(p.spec, warm))) == plain(reference, warm)
    params = [prefill(p.spec, prompt) for prompt in prompts]
    network.limit(4)  # 4 MB to each take 15 s
    with ThreadPoolExecutor(len(decoders)) as pool:
        start = time.monotonic()
        answers = [
            pool.submit(decode, d.spec, prompt, offer)
            for d, prompt, offer in zip(decoders, prompts, params, strict=True)
        ]
        for d in decoders:
            wait_until(lambda d=d: d.now(BORROWING) == 1, seconds=TIMEOUT, what=f"{d.spec.name} reads")
        time.sleep(1.0)
        network.cut()
        for d in decoders:  # until then only: how long a prompt takes an engine that recomputes is its processor's
            left = start + TIMEOUT + LATE - time.monotonic()
            wait_until(lambda d=d: d.now(BORROWING) == 0, seconds=left, what=f"{d.spec.name} has given up")
        responses = [answer.result() for answer in answers]

    for policy, prompt, response in zip(POLICIES, prompts, responses, strict=True):
        check(policy, response, plain(reference, prompt))
    assert any(d.now(LINGERING) > 0 for d in decoders)  # the reads were under way
    wait_until(lambda: nothing_held(p.spec), seconds=LEASE + LATE, what="P frees what was being read")
    later = prompt_of(435)
    start = time.monotonic()
    check("recompute", decode(decoders[0].spec, later, prefill(p.spec, later)), plain(reference, later))
    assert time.monotonic() - start < TIMEOUT + LATE
    network.heal()
    network.limit(None)
    for d in decoders:
        serves_on(d, reference, 436)
        wait_until(lambda d=d: step_and_look(d, LINGERING) == 0, seconds=LONG, what="NIXL lets go of the blocks")
        wait_until(lambda d=d: loads_again(p, d, reference), seconds=LONG, what="D loads from P again")


def step_and_look(d, name):
    """Return a metric after a step of the engine; test_prefill_engine.py asks what it does while it sleeps."""
    plain(d.spec, prompt_of(437, 20), tokens=1)
    return d.now(name)


fresh = iter(range(440, 500))


def loads_again(p, d, reference):
    """Whether D loads a new prompt from P; its text is right in any case."""
    before = d.now(LOADS)
    prompt = prompt_of(next(fresh))
    response = decode(d.spec, prompt, prefill(p.spec, prompt))
    loaded = d.now(LOADS) == before + 1
    if loaded or d.policy == "recompute":
        assert text_of(response) == plain(reference, prompt)
    return loaded
