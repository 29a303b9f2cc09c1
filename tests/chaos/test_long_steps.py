"""A step of 20 s, on either side, costs no lease of 7 s: renewals do not wait for the engine."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from support.cluster import wait_until
from support.legs import STALL_TOKENS, decode, plain, prefill, prompt_of, text_of
from support.victims import BORROWING, EXPIRED, LEASE, LOADS, LONG, RUNNING, STALL, WAITING, hold_seat

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: in both modes D renews the same leases."""
    return params["mode"] == "push"


def test_a_step_of_20_s_loses_no_lease(p, victims, reference):
    """Leased requests wait while the engine threads of P and of one D are kept, and while only P's is, for another D.

    Both steps last nearly three leases. Of the D that is not kept, the only seat is taken for more than two.
    """
    kept, other = victims.patient["recompute"], victims.hasty["recompute"]
    prompts = [prompt_of(500), prompt_of(501)]
    expired = p.now(EXPIRED)
    loads = [d.now(LOADS) for d in (kept, other)]
    with ThreadPoolExecutor(6) as pool, seat_of(kept, pool) as leave_kept, seat_of(other, pool) as leave_other:
        for d in (kept, other):
            wait_until(lambda d=d: d.now(RUNNING) == 1, seconds=LONG, what="D's seat is taken")
        steps = [pool.submit(timed_stall, kept, 502)]
        wait_until(lambda: kept.now(WAITING) == 1, seconds=LONG, what="D's long step comes next")
        answers = [
            pool.submit(decode, d.spec, prompt, prefill(p.spec, prompt))
            for d, prompt in zip((kept, other), prompts, strict=True)
        ]
        for d in (kept, other):
            wait_until(lambda d=d: d.now(BORROWING) == 1, seconds=LONG, what="the request is queued")
        start = time.monotonic()
        steps.append(pool.submit(timed_stall, p, 503))
        leave_kept.set()
        time.sleep(2.2 * LEASE)
        leave_other.set()
        lasted = [step.result() for step in steps]
        texts = [text_of(answer.result()) for answer in answers]
        waited = time.monotonic() - start

    assert min(lasted) >= STALL
    assert waited > STALL
    assert texts == [plain(reference, prompt) for prompt in prompts]
    assert p.now(EXPIRED) == expired
    assert [d.now(LOADS) for d in (kept, other)] == [before + 1 for before in loads]


@contextmanager
def seat_of(victim, pool):
    """Take the only seat of an engine; yields the event that frees it."""
    leave = threading.Event()
    seat = pool.submit(hold_seat, victim, leave)
    try:
        yield leave
    finally:
        leave.set()
    seat.result()


def timed_stall(victim, number):
    """Keep an engine's thread in one step; returns the seconds."""
    start = time.monotonic()
    plain(victim.spec, prompt_of(number, STALL_TOKENS), tokens=1)
    return time.monotonic() - start
