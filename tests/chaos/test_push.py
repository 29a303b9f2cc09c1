"""What can only go wrong where P writes into D's memory. All other tests here run for push, too."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.cluster import nothing_held, wait_until
from support.legs import decode, decode_body, plain, prefill, prompt_of, text_of
from support.victims import BORROWING, LATE, LINGERING, LONG, TIMEOUT, USAGE, check, hang_up, lost, serves_on

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.parametrize("mode", ["push"], indirect=True)]


def met(p, d, reference, number):
    prompt = prompt_of(number, 40)
    assert text_of(decode(d.spec, prompt, prefill(p.spec, prompt))) == plain(reference, prompt)


def test_aborted_before_anything_is_written(p, d, reference):
    """The client leaves while P is stopped: D keeps the blocks out of reach, serves others, and gets them back."""
    met(p, d, reference, 700)
    prompt = prompt_of(701, 900)
    params = prefill(p.spec, prompt)
    with p.frozen():
        hang_up(d.spec, decode_body(prompt, params), until=lambda: d.now(BORROWING) == 1)
        wait_until(lambda: d.now(LINGERING) == 29, seconds=20, what="the blocks are kept out of reach")
        serves_on(d, reference, 702)
    wait_until(lambda: d.now(LINGERING) == 0, seconds=20, what="P says that it does not write")
    wait_until(lambda: nothing_held(p.spec), seconds=20, what="P holds nothing")

    assert d.now(USAGE) == 0
    met(p, d, reference, 703)


def test_aborted_in_the_middle_of_the_push(network, p, d, reference):
    """Over a slow link P has written a part; D fills its whole cache with others meanwhile, and no text is wrong."""
    met(p, d, reference, 710)
    prompt = prompt_of(711, 900)
    params = prefill(p.spec, prompt)
    network.limit(4)  # 4 MB take 8 s
    hang_up(d.spec, decode_body(prompt, params), 1.0, until=lambda: d.now(BORROWING) == 1)
    wait_until(lambda: d.now(LINGERING) == 29, seconds=LONG, what="the blocks are kept out of reach")
    others = [prompt_of(712 + number, 1000) for number in range(12)]
    texts = [plain(d.spec, other) for other in others]
    wait_until(lambda: d.now(LINGERING) == 0, seconds=LONG, what="P says that it has stopped")
    wait_until(lambda: nothing_held(p.spec), seconds=LONG, what="P holds nothing")
    again = [plain(d.spec, other) for other in others]  # from D's cache: nothing has been written into it
    network.limit(None)

    assert texts == again == [plain(reference, other) for other in others]
    met(p, d, reference, 730)


def test_a_prefill_that_never_comes(p, victims, reference):
    """D has P's coordinates and a transfer that nobody computes: it gives up after registration_timeout, by policy."""
    decoders = list(victims.hasty.values())
    prompts = [prompt_of(740 + number, 300) for number in range(len(decoders))]
    for number, d in enumerate(decoders):
        met(p, d, reference, 742 + number)
    timeouts = [d.now(lost("timeout")) for d in decoders]
    params = prefill(p.spec, prompt_of(744, 40)) | {"transfer_id": "nobody computes this"}
    with ThreadPoolExecutor(len(decoders)) as pool:
        start = time.monotonic()
        answers = [
            pool.submit(decode, d.spec, prompt, params | {"transfer_id": f"nobody computes {d.spec.name}"})
            for d, prompt in zip(decoders, prompts, strict=True)
        ]
        for d in decoders:
            wait_until(lambda d=d: d.now(BORROWING) == 1, seconds=TIMEOUT, what=f"{d.spec.name} waits for P")
        for d in decoders:  # until then only: how long a prompt takes an engine that recomputes is its processor's
            left = start + TIMEOUT + LATE - time.monotonic()
            wait_until(lambda d=d: d.now(BORROWING) == 0, seconds=left, what=f"{d.spec.name} has given up")
        responses = [answer.result() for answer in answers]
        seconds = time.monotonic() - start

    assert seconds >= TIMEOUT
    for d, prompt, response in zip(decoders, prompts, responses, strict=True):
        check(d.policy, response, plain(reference, prompt))
        serves_on(d, reference, 745)
        wait_until(lambda d=d: d.now(LINGERING) == 0, seconds=LONG, what="nothing lingers")
    assert [d.now(lost("timeout")) for d in decoders] == [before + 1 for before in timeouts]
