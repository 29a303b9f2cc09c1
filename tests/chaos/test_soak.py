"""Everything at once for a while: afterwards nothing is held, borrowed, leaked or wrong."""

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.cluster import wait_until
from support.legs import OPEN, decode, decode_body, plain, prefill, prompt_of, text_of
from support.proc import memory, sockets, threads
from support.victims import LOADS, LONG, hang_up

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# For each half; what the first one has warmed up must not grow in the second. What leaks with every request, or is held
# for ever, shows in the 100 requests of ten seconds; what leaks now and then needs the longer one.
SECONDS = (10.0, 30.0)
CLIENTS = 6
PROMPTS = 250  # more than a decode engine has blocks for, so that most must be loaded
# vLLM keeps about a megabyte for every new number of tokens that it computes in one step (an engine without a connector
# grew by 97 MB in 100 prompts of different lengths): here they are all of one length, and few sums of it are new.
LENGTH = 150
GROWTH = 16 << 20  # bytes of one engine, all its processes


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: both modes free blocks by the same tables."""
    return (params["mode"], params["seconds"]) != ("pull", SECONDS[0])


class Traffic:
    """Clients that behave and clients that do not, from a seed."""

    def __init__(self, p, decoders, seed):
        self.p = p.spec
        self.decoders = [d.spec for d in decoders]
        self.answers = []  # (prompt's number, text)
        self.counts = Counter()
        self._rnd = random.Random(seed)
        self._rnd_lock = threading.Lock()

    def run(self, seconds):
        """Have all clients at work for so long."""
        end = time.monotonic() + seconds
        clients = [threading.Thread(target=self._client, args=(end,)) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def _client(self, end):
        kinds = [
            *[self.asks] * 6, *[self.leaves_at_decode] * 2, self.leaves_in_prefill, self.leaves_while_streaming,
            self.never_reaches_decode, self.is_rejected, self.asks_twice, self.asks_two_engines,
        ]  # fmt: skip
        while time.monotonic() < end:
            with self._rnd_lock:
                kind = self._rnd.choice(kinds)
                number = self._rnd.randrange(PROMPTS)
                d = self._rnd.choice(self.decoders)
                patience = self._rnd.random() * 0.3
            try:
                kind(number, d, patience)
                self.counts[kind.__name__] += 1
            except Exception as exc:
                self.counts[f"{kind.__name__}: {exc!r}"] += 1

    def asks(self, number, d, patience):
        """Prefill, decode."""
        prompt = soak_prompt(number)
        self._take(number, decode(d, prompt, prefill(self.p, prompt)))

    def leaves_in_prefill(self, number, d, patience):
        """P's request is aborted, queued or computed."""
        hang_up(self.p, {"prompt": soak_prompt(number), "max_tokens": 1, "kv_transfer_params": OPEN}, patience / 10)

    def never_reaches_decode(self, number, d, patience):
        """The lease is granted, and nobody asks."""
        prefill(self.p, soak_prompt(number))

    def leaves_at_decode(self, number, d, patience):
        """D's request is aborted, queued, reading or computing."""
        prompt = soak_prompt(number)
        hang_up(d, decode_body(prompt, prefill(self.p, prompt)), patience)

    def leaves_while_streaming(self, number, d, patience):
        """The same, having seen the first token."""
        prompt = soak_prompt(number)
        hang_up(
            d, decode_body(prompt, prefill(self.p, prompt), tokens=200) | {"stream": True}, patience, after=b"data:"
        )

    def is_rejected(self, number, d, patience):
        """D does not take the request: too many tokens."""
        prompt = soak_prompt(number)
        assert decode(d, prompt, prefill(self.p, prompt), tokens=100_000).status_code == 400

    def asks_twice(self, number, d, patience):
        """The same params again, once the first answer is there: the lease is over."""
        prompt = soak_prompt(number)
        params = prefill(self.p, prompt)
        for _ in range(2):
            self._take(number, decode(d, prompt, params))

    def asks_two_engines(self, number, d, patience):
        """The same params at two engines at the same time."""
        prompt = soak_prompt(number)
        params = prefill(self.p, prompt)
        with ThreadPoolExecutor(2) as pool:
            for response in pool.map(lambda d: decode(d, prompt, params), self.decoders):
                self._take(number, response)

    def _take(self, number, response):
        self.answers.append((number, text_of(response)))


def soak_prompt(number):
    return prompt_of(1000 + number, LENGTH)


def footprint(victim):
    return {"bytes": memory(victim.child), "threads": threads(victim.child), "sockets": sockets(victim.child)}


@pytest.mark.parametrize("seconds", SECONDS)
def test_mixed_traffic_leaves_nothing(p, victims, reference, seconds):
    """Every text is right; at rest all tables are empty; memory is bounded, threads and sockets are as they were."""
    decoders = [victims.hasty["recompute"], victims.patient["recompute"]]
    engines = [p, *decoders]
    traffic = Traffic(p, decoders, seed=1)
    loads = sum(d.now(LOADS) for d in decoders)
    seen = []
    for _ in range(2):
        traffic.run(seconds)
        for victim in engines:
            wait_until(lambda victim=victim: victim.at_rest, seconds=LONG, what=f"{victim.spec.name} is at rest")
        seen.append([footprint(victim) for victim in engines])
    expected = {number: plain(reference, soak_prompt(number)) for number in {number for number, _ in traffic.answers}}
    print(f"\n{dict(traffic.counts)}\n{sum(d.now(LOADS) for d in decoders) - loads:.0f} loads")
    for victim, *halves in zip(engines, *seen, strict=True):
        print(victim.spec.name, halves)

    assert [name for name in traffic.counts if ":" in name] == []
    assert len(traffic.counts) == 8
    assert [number for number, text in traffic.answers if text != expected[number]] == []
    for victim, middle, end in zip(engines, *seen, strict=True):
        assert end["bytes"] - middle["bytes"] < GROWTH, victim.spec.name
        assert (end["threads"], end["sockets"]) == (middle["threads"], middle["sockets"]), victim.spec.name
