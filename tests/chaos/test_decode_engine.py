"""A decode engine that is overloaded, frozen or killed: P's blocks come back, and no text is wrong."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from support.cluster import nothing_held, wait_until
from support.legs import SLOW_TOKENS, decode, plain, prefill, prompt_of, text_of
from support.victims import (
    BORROWING,
    EXPIRED,
    HELD,
    LATE,
    LEASE,
    LINGERING,
    LOADS,
    LONG,
    RUNNING,
    TIMEOUT,
    check,
    lost,
    queue_of,
    reading,
    reuse_blocks,
    serves_on,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# What does not happen in the middle of a transfer is the same in both modes: ``make test-all`` has it in one.
THOROUGH = {
    ("test_an_overloaded_decode_engine_loses_no_lease", "push"),
    ("test_frozen_before_the_read", "pull"),
    ("test_frozen_after_the_read", "push"),
    ("test_a_request_that_never_reaches_decode_is_freed_at_lease_end", "push"),
}


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``."""
    return (test, params["mode"]) in THOROUGH


def test_an_overloaded_decode_engine_loses_no_lease(p, d, reference):
    """20 requests wait for more than two leases in D's queue: none expires, all are loaded, every text is right."""
    expired = p.now(EXPIRED)
    loads = d.now(LOADS)
    with queue_of(20, p, d, first=200, busy=True) as (prompts, answers, leave):
        time.sleep(2.2 * LEASE)
        assert not any(answer.done() for answer in answers)
        leave.set()
        texts = [text_of(answer.result()) for answer in answers]

    wait_until(lambda: nothing_held(p.spec), seconds=LONG, what="P holds nothing")

    assert texts == [plain(reference, prompt) for prompt in prompts]
    assert p.now(EXPIRED) == expired, f"P: {p.child.tail(60)}\nD: {d.child.tail(60)}"
    assert d.now(LOADS) == loads + 20


def freeze_beyond_leases(p, decoders):
    """Freeze decode engines until their leases and the time for a transfer are over.

    P's blocks are free when the leases end, and P uses every block for something else.
    """
    with ExitStack() as thawing:
        for d in decoders:
            thawing.enter_context(d.frozen())
        start = time.monotonic()
        p.thaw()
        wait_until(lambda: nothing_held(p.spec), seconds=LEASE + LATE, what="P frees what frozen engines had leased")
        reuse_blocks(p)
        time.sleep(max(0.0, TIMEOUT + 1 - (time.monotonic() - start)))


def test_frozen_before_the_read(p, victims, reference):
    """SIGSTOP of D with 20 leases (and of the other policy's with 5): each costs one lease, and no text is wrong.

    Under policy fail, too, a request gets its text if D hears that its lease is over before it orders the load: it then
    computes the prompt itself. One whose load was ordered fails.
    """
    before = p.now(EXPIRED)
    counts = {"recompute": 20, "fail": 5}
    with ExitStack() as stack:
        queued = [
            (d, *stack.enter_context(queue_of(counts[policy], p, d, first=230 + 30 * number)))
            for number, (policy, d) in enumerate(victims.hasty.items())
        ]
        freeze_beyond_leases(p, victims.hasty.values())
        for *_, leave in queued:
            leave.set()
        answers = [
            (d, prompt, answer.result())
            for d, prompts, answers, _ in queued
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    assert p.now(EXPIRED) == before + 25
    for d, prompt, response in answers:
        expected = plain(reference, prompt)
        if d.policy == "recompute" or not is_right(response, expected):
            check(d.policy, response, expected)
    for number, d in enumerate(victims.hasty.values()):
        serves_on(d, reference, 300 + number)


def is_right(response, expected):
    """Whether an answer is there, and the right one."""
    choice = response.json()["choices"][0] if response.status_code == 200 else {"finish_reason": "error"}
    return choice["finish_reason"] != "error" and choice["text"] == expected


def test_frozen_during_the_read(p, victims, reference, mode):
    """D's read is under way when D freezes; P reuses the blocks; the read ends after the thaw, and is not believed.

    Patient engines find that the lease was lost: that of vLLM 0.32 answers HTTP 200 with the wrong text
    here. For the others the timeout is over, too: the read is given up, and what it still brings must not
    land in blocks that D has begun to use for itself.

    In push a thawed D acknowledges P's last writes on one thread and looks at its own limits on another. And P, which
    is not patient, says that a write does not end. So "timeout" or "lease" is why, whichever is first, and once.
    """

    def failures(d):
        of_pull = ("lease",) if d in victims.patient.values() else ("timeout",)
        return sum(d.now(lost(why)) for why in (of_pull if mode == "pull" else ("timeout", "lease")))

    before = {d.spec.name: failures(d) for d in victims.decoders}
    prompts = [prompt_of(320 + number, 900) for number in range(len(victims.decoders))]
    with reading(p, victims.decoders, prompts, reference) as answers:
        freeze_beyond_leases(p, victims.decoders)
        responses = [answer.result() for answer in answers]

    for d, prompt, response in zip(victims.decoders, prompts, responses, strict=True):
        check(d.policy, response, plain(reference, prompt))
        serves_on(d, reference, 330)
        assert failures(d) == before[d.spec.name] + 1
        wait_until(lambda d=d: d.now(LINGERING) == 0, seconds=LONG, what="no block lingers")


def test_frozen_after_the_read(p, victims, reference):
    """What D has read is D's: frozen while it answers, it goes on where it was."""
    tokens = 160  # eight seconds of slow steps
    decoders = list(victims.hasty.values())
    prompts = [prompt_of(340 + number, 300 + SLOW_TOKENS) for number in range(len(decoders))]
    failures = [{why: d.now(lost(why)) for why in ("lease", "timeout", "peer", "transfer")} for d in decoders]
    with ThreadPoolExecutor(len(decoders)) as pool:
        answers = [
            pool.submit(decode, d.spec, prompt, prefill(p.spec, prompt), tokens=tokens)
            for d, prompt in zip(decoders, prompts, strict=True)
        ]
        for d in decoders:
            wait_until(lambda d=d: d.now(RUNNING) == 1 and d.now(BORROWING) == 0, seconds=LONG, what="D decodes")
        freeze_beyond_leases(p, decoders)
        assert not any(answer.done() for answer in answers)
        texts = [text_of(answer.result()) for answer in answers]

    assert texts == [plain(reference, prompt, tokens=tokens) for prompt in prompts]
    assert failures == [{why: d.now(lost(why)) for why in found} for d, found in zip(decoders, failures, strict=True)]


def test_a_killed_decode_engine_frees_everything_before_its_leases_end(p, d, victims, reference):
    """kill -9 of D with 20 leases: noticed when its connection closes; other decode engines are served meanwhile."""
    other = victims.patient["recompute"]
    prompt = prompt_of(650)
    before = p.now("vllm:pdrelay_leases_peer_lost_total")
    with queue_of(20, p, d, first=600) as (_, answers, _):
        wait_until(lambda: p.now(HELD) == 20, seconds=LONG, what="P holds all")
        d.kill()
        wait_until(lambda: nothing_held(p.spec), seconds=LEASE + LATE, what="P frees what a dead D had leased")
        text = text_of(decode(other.spec, prompt, prefill(p.spec, prompt)))

    assert all(answer.exception() is not None for answer in answers)  # broken connections, no made-up answers
    assert text == plain(reference, prompt)
    assert p.now("vllm:pdrelay_leases_peer_lost_total") == before + 20


def test_a_request_that_never_reaches_decode_is_freed_at_lease_end(p):
    """The TTL of last resort, on an engine that sleeps."""
    expired = p.now(EXPIRED)
    asked = time.monotonic()
    prefill(p.spec, prompt_of(295))
    assert not nothing_held(p.spec)
    wait_until(lambda: nothing_held(p.spec), seconds=LEASE + LATE, what="P frees what nobody asked for")

    assert time.monotonic() - asked > LEASE
    assert p.now(EXPIRED) == expired + 1
