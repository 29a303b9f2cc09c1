"""What is measured of one pair of engines.

Times are seconds; each function adds to the ``seen`` it is given.
"""

import time
from collections import defaultdict

from benchmarks.connector.pairs import LEG_LENGTHS, LENGTHS
from support.proc import cpu_seconds

SETTLE = 1.0  # s after traffic, before a core is looked at
WATCH = 5.0  # s for which it is
HELD = 999  # tokens of a prompt whose KV nobody takes


def decode_leg(pair, prompt, requests, seen):
    """Measure D's leg alone, sent when P has answered."""
    for length in LEG_LENGTHS:
        pair.send(prompt(length))  # every code path once, outside the measurement
    for _ in range(requests):
        for length in LEG_LENGTHS:
            legs = pair.send(prompt(length))
            seen.setdefault(str(length), []).append(legs.first_token - legs.decode)


def resting(pair, client, prompt, seen):
    """Measure the cores of a pair that nobody asks for anything, and of P while it holds KV.

    The last thing it does.
    """
    time.sleep(SETTLE)
    seen.setdefault("idle", []).append(cores(pair.pids))
    client.prefill(pair.p, prompt(HELD), "nobody")
    seen.setdefault("holding", []).append(cores(pair.pids[:1]))


def whole(pair, prompt, requests, seen):
    """Measure requests from their first leg to D's first token, and how much of it the transfer was
    exposed.
    """
    with pair.no_recompute(requests * sum(length - 1 for length in LENGTHS)):
        for _ in range(requests):
            for length in LENGTHS:
                legs = pair.send(prompt(length))
                found = defaultdict(list, seen.get(str(length), {}))
                found["first_token"].append(legs.first_token - legs.start)
                found["prefill"].append(legs.prefilled - legs.start)
                found["exposed"].append(pair.exposed(legs.name))
                seen[str(length)] = dict(found)


def waiting(pair, client, prompt, seen):
    """Measure the cores of D while its leg waits for a P that has not been asked yet."""
    client.push(
        pair,
        prompt(256),
        meanwhile=lambda: seen.setdefault("cores", []).append(cores(pair.pids[1:])),
    )


def cores(leaders):
    """Return the cores that process groups use for a while."""
    before = sum(map(cpu_seconds, leaders))
    start = time.monotonic()
    time.sleep(WATCH)
    return (sum(map(cpu_seconds, leaders)) - before) / (time.monotonic() - start)
