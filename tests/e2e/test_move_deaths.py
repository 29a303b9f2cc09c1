"""A whole engine's streams, forty of 2,000 tokens, while it is drained by moving them and something dies or freezes.

Small scenes are in test_move.py. ``pytest -s -m thorough tests/e2e/test_move_deaths.py`` prints what
docs/moving-streams.md has.
"""

import contextlib
import signal
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from support.both_roles import BOTH, MOVES
from support.cluster import base_url, engine_spec, router_command, wait_until
from support.fixtures import ADMIN_KEY
from support.greedy_streams import bodies, run
from support.router_orders import all_at, moved_streams, order, rows, wait_known
from support.victims import HELD, Victim

# Each test takes 80,000 tokens of two cores, and most an engine's start.
pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(900)]

STREAMS = 40
TOKENS = 2000
BEHIND = 100
LEASE = 30  # s; kv_lease_duration
ENV = {"ADMIN_API_KEY": ADMIN_KEY}


@pytest.fixture(scope="module", params=TransferMode, ids=str)
def fleet_of(request, fleet, model):
    """Engines that lend and take KV in both directions: p is P, d and e are D."""
    mode = request.param
    named = {name: Victim(engine_spec(f"deaths-{mode}-{name}", model, mode=mode, **BOTH), fleet) for name in "pde"}
    yield SimpleNamespace(**named, all=list(named.values()), mode=mode, fleet=fleet)
    fleet.stop(*(victim.child for victim in named.values() if victim.child in fleet.children))


@pytest.fixture
def engines(fleet_of):
    """The same, and all of them are alive and at rest."""
    for victim in fleet_of.all:
        victim.start()
    fleet_of.fleet.wait_ready([victim.child for victim in fleet_of.all], timeout_s=300)
    at_rest(*fleet_of.all)
    return fleet_of


@pytest.fixture(scope="module")
def texts():
    """What one engine says, by the mode: it is asked once."""
    return {}


@pytest.fixture
def expected(engines, texts):
    """What one engine says."""
    if engines.mode not in texts:
        texts[engines.mode] = run(engines.p.spec.base_url, asked("alone"))
        at_rest(engines.p)
    return texts[engines.mode]


@contextlib.contextmanager
def open_router(engines, name):
    """Yield a router, 1P2D, and its URL; it ends with the block, for its probes would load the machine."""
    name = f"router-deaths-{engines.mode}-{name}"
    command = router_command(name, [engines.p.spec], [engines.d.spec, engines.e.spec], args=MOVES, env=ENV)
    child = engines.fleet.start(command)
    url = base_url(command)
    engines.fleet.wait_ready([child], timeout_s=30)
    wait_known(url)
    try:
        yield child, url
    finally:
        if child in engines.fleet.children:
            engines.fleet.stop(child)


@pytest.fixture
def router(engines, request):
    """1P2D."""
    with open_router(engines, request.node.name.split("[")[0][5:]) as (_, url):
        yield url


def asked(salt):
    return bodies(STREAMS, TOKENS, seed=7, salt=salt)


def verdicts(streams, expected):
    return Counter(one.verdict(other) for one, other in zip(streams, expected, strict=True))


def at_rest(*victims):
    """Wait until engines hold and serve nothing; what nobody comes for is kept for a lease. Return the seconds."""
    start = time.monotonic()
    for victim in victims:
        wait_until(lambda v=victim: v.at_rest, seconds=LEASE + 20, what=f"{victim.spec.name} is at rest")
    return time.monotonic() - start


def begin(url, moved):
    """Drain the engine of all streams, and return when some have moved; and the time at which it was drained."""
    start = time.monotonic()
    order(url, "drain", "decode-0", move=True)
    wait_until(lambda: moved_streams(url)["moved"] >= moved, seconds=120, what="some have moved")
    return start


def is_empty(url):
    return rows(url)["decode-0"]["in_flight"] == 0


def said(engines, what, found, moves, seconds, *alive):
    """Print what has become of the streams; ``seconds``: until their engine was empty. Wait for the engines' rest."""
    held = sum(int(victim.now(HELD)) for victim in alive)
    rest = at_rest(*alive)
    left = sum(int(victim.now(HELD)) for victim in alive)
    empty = "" if seconds is None else f"empty after {seconds:.2f} s; "
    print(
        f"\n{engines.mode}: {what}: {dict(found)}; were to move: {dict(moves)}; {empty}leases {held} at the end of the "
        f"last stream, {left} when at rest {rest:.1f} s later"
    )


@pytest.mark.parametrize("moved", [0, 1])
def test_the_engine_that_drains_is_frozen(engines, expected, router, moved):
    """Before the first move, and in the middle of some: what it does not hand over is computed anew."""
    took = []

    def drain():
        if moved == 0:
            engines.d.freeze()
        try:
            start = begin(router, moved)
            engines.d.freeze()
            wait_until(lambda: is_empty(router), seconds=300, what="all have left")
            took.append(time.monotonic() - start)
        finally:
            engines.d.thaw()

    streams = all_at(router, "decode-0", "decode-1", asked(f"frozen {moved}"), drain, behind=BEHIND)
    found = verdicts(streams, expected)
    moves = moved_streams(router)
    said(engines, f"D1 frozen behind {moved} moves", found, moves, took[0], *engines.all)

    assert found == {"right": STREAMS}
    assert moves.total() == STREAMS
    assert moves.keys() <= {"moved", "resumed"}


def test_the_prefill_engine_dies(engines, expected, router):
    """It has no part in a move: all of them move."""
    took = []

    def drain():
        start = begin(router, 1)
        engines.p.kill()
        wait_until(lambda: is_empty(router), seconds=120, what="all have left")
        took.append(time.monotonic() - start)

    streams = all_at(router, "decode-0", "decode-1", asked("p dies"), drain, behind=BEHIND)
    found = verdicts(streams, expected)
    moves = moved_streams(router)
    said(engines, "P killed", found, moves, took[0], engines.d, engines.e)

    assert found == {"right": STREAMS}
    assert moves == {"moved": STREAMS}


def test_the_target_dies(engines, expected, router):
    """No D is left: what had moved and what was moving goes back, the rest stays; at worst a client gets an error."""

    def drain():
        begin(router, 1)
        engines.e.kill()

    streams = all_at(router, "decode-0", "decode-1", asked("target dies"), drain, behind=BEHIND)
    found = verdicts(streams, expected)
    moves = moved_streams(router)
    said(engines, "D2 killed", found, moves, None, engines.p, engines.d)

    assert found.keys() <= {"right", "honest"}
    assert found["right"] > 0
    assert moves.total() > moves["moved"]  # some were between the two


def test_the_router_dies(engines, expected):
    """Nothing of what clients have got is wrong; engines keep nothing for it, and nothing wrong in their caches."""
    moves = []
    with open_router(engines, "dies") as (child, url):

        def drain():
            order(url, "undrain", "decode-1")
            begin(url, 1)
            moves.append(moved_streams(url))
            child.signal(signal.SIGKILL)
            engines.fleet.stop(child)

        order(url, "drain", "decode-1")
        streams = run(url, asked("router dies"), drain, behind=BEHIND)
    found = verdicts(streams, expected)
    said(engines, "router killed", found, moves[0], None, *engines.all)
    with open_router(engines, "next") as (_, url):
        again = verdicts(run(url, asked("router dies")), expected)
        said(engines, "the same from another router", again, moved_streams(url), None, *engines.all)

    assert found.keys() <= {"right", "broken"}
    assert found["broken"] > 0
    assert moves[0]["moved"] < STREAMS
    assert again == {"right": STREAMS}
