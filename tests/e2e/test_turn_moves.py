"""Streams that move because their engine turns, and what happens to them when something dies in the middle of that.

Three engines, 1P2D at first; the first D turns to prefill while half of the streams are at it. What is measured is
printed: ``pytest -s -m thorough tests/e2e/test_turn_moves.py``.
"""

import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from support.both_roles import MOVES, both_engines
from support.cluster import base_url, nothing_held, router_command, start_engine, wait_until
from support.fixtures import ADMIN_KEY
from support.greedy_streams import bodies, run
from support.router_orders import Wave, moved_streams, order, rows, serves, turn, wait_known

# Each test takes streams of a thousand tokens, and most an engine's start: minutes of two cores.
pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(500)]

STREAMS, TOKENS = 8, 1200
ENV = {"ADMIN_API_KEY": ADMIN_KEY}


@pytest.fixture(scope="module", params=TransferMode, ids=str)
def fleet_of(request, fleet, model):
    """Engines that lend and take KV in both directions: a is P, b and c are D."""
    with both_engines(fleet, model, "moves", "abc", request.param) as engines:
        yield engines


@pytest.fixture
def engines(fleet_of):
    """The same, and all of them are alive."""
    dead = [name for name, child in fleet_of.children.items() if child not in fleet_of.fleet.children]
    fleet_of.children |= {name: start_engine(fleet_of.fleet, fleet_of.named[name]) for name in dead}
    fleet_of.fleet.wait_ready([fleet_of.children[name] for name in dead], timeout_s=300)
    return fleet_of


@pytest.fixture
def expected(engines):
    """What one engine says."""
    return run(engines.named["c"].base_url, asked("alone"))


@pytest.fixture
def router(engines, start_router, request):
    """1P2D."""
    name = f"router-moves-{engines.mode}-{request.node.name.split('[')[0][5:]}"
    a, *others = engines.specs
    url = start_router(name, [a], others, args=MOVES, env=ENV)
    wait_known(url)
    return url


def asked(salt):
    return bodies(STREAMS, TOKENS, seed=1, salt=salt)


def kill(engines, name):
    """End an engine without a word."""
    child = engines.children[name]
    child.signal(signal.SIGKILL)
    engines.fleet.stop(child)


def some_have_moved(url):
    wait_until(lambda: moved_streams(url)["moved"] >= 1, seconds=60, what="some have moved")


def at_rest(engines, *names):
    """Wait until engines hold nothing; what nobody came for is kept for kv_lease_duration (30 s)."""
    for name in names:
        spec = engines.named[name]
        wait_until(lambda spec=spec: nothing_held(spec), seconds=45, what=f"{spec.name} is idle")


def in_the_middle(url, act):
    """Begin a turn and do something when the first streams have moved; return the seconds until both are over."""
    start = time.monotonic()
    with ThreadPoolExecutor(1) as beside:
        acted = beside.submit(lambda: (some_have_moved(url), act()))
        turn(url, "decode-0", "prefill")
        acted.result()
    return time.monotonic() - start


def said(engines, what, found, took, url):
    print(f"\n{engines.mode}: {what}: {dict(found)}; after {took:.2f} s; were to move: {dict(moved_streams(url))}")


def test_the_streams_of_an_engine_that_turns_move(engines, expected, router):
    """It serves its new role in seconds, and not when its longest answer is over; then the P turns, too."""
    one = Wave(router, asked("first"))
    took = turn(router, "decode-0", "prefill")
    two = Wave(router, asked("second"))
    back = turn(router, "prefill-0", "decode")
    found = Counter(one.end(expected) + two.end(expected))
    said(engines, "nothing dies", found, took, router)
    at_rest(engines, "a", "b", "c")

    assert found == {"right": 2 * STREAMS}
    assert moved_streams(router).keys() == {"moved"}
    assert moved_streams(router)["moved"] >= 2
    assert back < 60


def test_the_prefill_engine_dies(engines, expected, router):
    """What was to move over it is computed by the D that is left; the engine that turns takes its place."""
    wave = Wave(router, asked("p dies"))
    took = in_the_middle(router, lambda: kill(engines, "a"))
    found = Counter(wave.end(expected))
    said(engines, "P killed", found, took, router)
    again = Counter(Wave(router, asked("p is dead")).end(expected))
    at_rest(engines, "b", "c")

    assert found.keys() <= {"right", "honest"}
    assert found["right"] > 0
    assert again == {"right": STREAMS}


def test_the_decode_engine_that_takes_them_dies(engines, expected, router):
    """No D is left: they go back to the engine that turns, or end with an error; when a D is back, all is well."""
    wave = Wave(router, asked("d dies"))
    took = in_the_middle(router, lambda: kill(engines, "c"))
    found = Counter(wave.end(expected))
    said(engines, "D killed", found, took, router)
    at_rest(engines, "a", "b")
    engines.children["c"] = start_engine(engines.fleet, engines.named["c"])
    engines.fleet.wait_ready([engines.children["c"]], timeout_s=300)
    wait_until(lambda: rows(router)["decode-1"]["state"] == "healthy", seconds=90, what="D is back")
    again = Counter(Wave(router, asked("d is back")).end(expected))
    at_rest(engines, "a", "b", "c")

    assert found.keys() <= {"right", "honest"}
    assert found["right"] > 0
    assert again == {"right": STREAMS}


def test_the_engine_that_turns_dies(engines, expected, router):
    """Its streams go on at the other D, and it comes back in its new role: the router has not forgotten the turn."""
    wave = Wave(router, asked("it dies"))
    order(router, "turn", "decode-0", to="prefill")
    some_have_moved(router)
    kill(engines, "b")
    found = Counter(wave.end(expected))
    said(engines, "the engine that turns killed", found, 0.0, router)
    at_rest(engines, "a", "c")
    engines.children["b"] = start_engine(engines.fleet, engines.named["b"])
    engines.fleet.wait_ready([engines.children["b"]], timeout_s=300)
    wait_until(lambda: serves(router, "decode-0", "prefill"), seconds=90, what="it has turned")
    wait_until(lambda: rows(router)["decode-0"]["state"] == "healthy", seconds=90, what="it is back")
    again = Counter(Wave(router, asked("it is back")).end(expected))
    at_rest(engines, "a", "b", "c")

    assert found.keys() <= {"right", "honest"}
    assert found["right"] > 0
    assert again == {"right": STREAMS}


def test_the_router_dies(engines, expected, tmp_path):
    """Clients lose their connections, and nothing they have got is wrong; another router of the store ends the turn."""
    args = (*MOVES, "--store", f"file:{tmp_path / 'store'}")
    name = f"router-moves-{engines.mode}-dies"
    a, *others = engines.specs
    routers = []
    try:
        for number in range(2):
            command = router_command(f"{name}-{number}", [a], others, args=args, env=ENV)
            child = engines.fleet.start(command)
            routers.append(child)
            engines.fleet.wait_ready([child], timeout_s=30)
            url = base_url(command)
            wait_known(url)
            if number == 0:
                wave = Wave(url, asked("router dies"))
                order(url, "turn", "decode-0", to="prefill")
                some_have_moved(url)
                child.signal(signal.SIGKILL)
                engines.fleet.stop(routers.pop())
                found = Counter(wave.end(expected))
                at_rest(engines, "a", "b", "c")
        wait_until(lambda: serves(url, "decode-0", "prefill"), seconds=60, what="the turn goes on")
        again = Counter(Wave(url, asked("another router")).end(expected))
        print(f"\n{engines.mode}: router killed: {dict(found)}, then {dict(again)}")
        at_rest(engines, "a", "b", "c")
    finally:
        engines.fleet.stop(*routers)

    assert found.keys() <= {"right", "broken"}
    assert found["broken"] > 0
    assert again == {"right": STREAMS}
