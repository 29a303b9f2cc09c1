"""A step of 20 s, on either side, costs no lease of 3 s: renewals do not wait for the engine."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.cluster import wait_until
from support.legs import STALL_TOKENS, decode, plain, prefill, prompt_of, text_of
from support.victims import BORROWING, EXPIRED, LOADS, RUNNING, STALL, WAITING, hold_seat

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: in both modes D renews the same leases."""
    return params["mode"] == "push"


def test_a_step_of_20_s_loses_no_lease(p, victims, reference):
    """Leased requests wait while the engine threads of P and of one D are kept, and while only P's is, for another D.

    Both steps last seven leases. Of the D that is not kept, the only seat is taken for more than three.
    """
    kept, other = victims.patient["recompute"], victims.hasty["recompute"]
    prompts = [prompt_of(500), prompt_of(501)]
    expired, loads = p.now(EXPIRED), [d.now(LOADS) for d in (kept, other)]
    with ThreadPoolExecutor(6) as pool:
        seats = [pool.submit(hold_seat, kept, 3), pool.submit(hold_seat, other, 10)]
        for d in (kept, other):
            wait_until(lambda d=d: d.now(RUNNING) == 1, seconds=20, what="D's seat is taken")
        steps = [pool.submit(timed_stall, kept, 502)]
        wait_until(lambda: kept.now(WAITING) == 1, seconds=5, what="D's long step comes next")
        answers = [
            pool.submit(decode, d.spec, prompt, prefill(p.spec, prompt))
            for d, prompt in zip((kept, other), prompts, strict=True)
        ]
        for d in (kept, other):
            wait_until(lambda d=d: d.now(BORROWING) == 1, seconds=5, what="the request is queued")
        steps.append(pool.submit(timed_stall, p, 503))
        start = time.monotonic()
        lasted = [step.result() for step in steps]
        texts = [text_of(answer.result()) for answer in answers]
        waited = time.monotonic() - start
        for seat in seats:
            seat.result()

    assert min(lasted) >= STALL
    assert waited > STALL
    assert texts == [plain(reference, prompt) for prompt in prompts]
    assert p.now(EXPIRED) == expired
    assert [d.now(LOADS) for d in (kept, other)] == [before + 1 for before in loads]


def timed_stall(victim, number):
    """Keep an engine's thread in one step; returns the seconds."""
    start = time.monotonic()
    plain(victim.spec, prompt_of(number, STALL_TOKENS), tokens=1)
    return time.monotonic() - start
