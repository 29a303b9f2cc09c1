"""Engines that turn while they serve: the texts of one engine, whatever each of them is at the moment.

What is measured is printed: ``pytest -s tests/e2e/test_turn.py`` makes the numbers of docs/turning-roles.md.
"""

from collections import Counter

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from support.both_roles import MOVES, both_engines
from support.cluster import Watch, nothing_held, wait_until
from support.fixtures import ADMIN_KEY
from support.greedy_streams import bodies, run
from support.router_orders import Wave, counted, rows, turn, wait_known

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]

STREAMS, TOKENS = 8, 400


def is_thorough(_test, params):
    """Tell what is only for ``make test-thorough``: who moves prompts makes no difference to what turns."""
    return params.get("fleet_of") is TransferMode.PUSH


@pytest.fixture(scope="module", params=TransferMode, ids=str)
def fleet_of(request, fleet, model):
    """Engines that lend and take KV in both directions."""
    with both_engines(fleet, model, "turn", "abc", request.param) as engines:
        yield engines


@pytest.fixture
def router(fleet_of, start_router, request):
    """1P2D: a is P."""
    env = {"ADMIN_API_KEY": ADMIN_KEY}
    name = request.node.name.split("[")[0][5:]
    url = start_router(
        f"router-turn-{fleet_of.mode}-{name}", [fleet_of.a], [fleet_of.b, fleet_of.c], args=MOVES, env=env
    )
    wait_known(url)
    return url


def test_engines_turn_while_they_serve(fleet_of, router):
    """D to P, P to D, and D to both, each with streams running; no token is lost, and no engine is restarted."""
    expected = {
        seed: run(fleet_of.a.base_url, bodies(STREAMS, TOKENS, seed=seed, salt=f"alone {seed}")) for seed in (1, 2)
    }
    took, found = [], []

    def wave(seed, salt):
        return Wave(router, bodies(STREAMS, TOKENS, seed=seed, salt=salt))

    one = wave(1, "first")
    took.append(turn(router, "decode-0", "prefill"))
    two = wave(2, "second")
    took.append(turn(router, "prefill-0", "decode"))
    found += one.end(expected[1])
    three = wave(1, "third")
    took.append(turn(router, "decode-1", "both"))
    four = wave(2, "fourth")
    found += two.end(expected[2]) + three.end(expected[1]) + four.end(expected[2])
    for spec in fleet_of.specs:
        wait_until(lambda spec=spec: nothing_held(spec), seconds=30, what=f"{spec.name} is idle")
    with Watch(fleet_of.a) as a, Watch(fleet_of.b) as b, Watch(fleet_of.c) as c:
        found += wave(1, "fifth").end(expected[1])
    print(
        f"\n{fleet_of.mode}: {STREAMS} streams of {TOKENS} tokens in each of 5 waves: {dict(Counter(found))}; "
        f"D to P after {took[0]:.2f} s, P to D {took[1]:.2f} s, D to both {took[2]:.2f} s; "
        f"{counted(router, 'pdrelay_turns')}"
    )

    assert Counter(found) == {"right": 5 * STREAMS}
    assert {name: row["role"] for name, row in rows(router).items()} == {
        "prefill-0": "decode",
        "decode-0": "prefill",
        "decode-1": "both",
    }
    granted, loads = "vllm:pdrelay_leases_granted_total", "vllm:pdrelay_loads_total"
    if fleet_of.mode is TransferMode.PULL:
        assert (a.delta(granted), b.delta(loads)) == (0, 0)
        assert b.delta(granted) + c.delta(granted) >= STREAMS
        assert a.delta(loads) + c.delta(loads) >= STREAMS
    assert sum(counted(router, "pdrelay_turns").values()) == 3
