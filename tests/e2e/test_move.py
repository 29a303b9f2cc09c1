"""Streams that move from an engine that is drained: the texts of one engine, and hardly a token computed twice.

What is measured is printed: ``pytest -s tests/e2e/test_move.py`` makes the numbers of docs/moving-streams.md.
"""

import contextlib
import signal
import statistics
import time
from collections import Counter

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from support.both_roles import MOVES, both_engines
from support.cluster import Watch, base_url, nothing_held, router_command, wait_until
from support.fixtures import ADMIN_KEY
from support.greedy_streams import bodies, run, run_at
from support.hand_chats import COMPUTED, LOADED
from support.proc import pids_of, wait_stopped
from support.router_orders import all_at, moved_streams, order, rows, wait_known

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]

BLOCK = 32  # tokens of a block of the engines here


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: who moves prompts makes no difference to what is cut."""
    return params.get("fleet_of") is TransferMode.PUSH and test != "test_engines_are_both_at_the_same_time"


@pytest.fixture(scope="module", params=TransferMode, ids=str)
def fleet_of(request, fleet, model):
    """Engines that lend and take KV in both directions."""
    with both_engines(fleet, model, "move", ("p0", "d0", "d1"), request.param, step_s=0.01) as engines:
        yield engines


@pytest.fixture
def router(fleet_of, start_router, request):
    """1P2D."""
    name = f"router-move-{fleet_of.mode}-{request.node.name.split('[')[0][5:]}"
    env = {"ADMIN_API_KEY": ADMIN_KEY}
    url = start_router(name, [fleet_of.p0], [fleet_of.d0, fleet_of.d1], args=MOVES, env=env)
    wait_known(url)
    return url


def emptied(url, name, taken):
    """Drain an engine by moving its streams; ``taken`` gets the seconds until it has none."""
    start = time.monotonic()
    order(url, "drain", name, move=True)
    wait_until(lambda: rows(url)[name]["in_flight"] == 0, seconds=60, what=f"{name} is empty")
    taken.append(time.monotonic() - start)


def move_all(fleet_of, url, count, tokens, *, seed, behind):
    """Move all streams of an engine; return the seconds until it was empty."""
    expected = run(fleet_of.p0.base_url, bodies(count, tokens, seed=seed, salt=f"alone {seed}"))
    taken, watches = [], []

    def drain():
        watches.extend(Watch(spec, begins_busy=True).__enter__() for spec in (fleet_of.p0, fleet_of.d0, fleet_of.d1))
        emptied(url, "decode-0", taken)

    streams = all_at(
        url, "decode-0", "decode-1", bodies(count, tokens, seed=seed, salt=f"moved {seed}"), drain, behind=behind
    )
    for watch in watches:
        watch.__exit__()
    p, left, d = watches
    gaps = sorted(stream.longest_s * 1000 for stream in streams)
    print(
        f"\n{fleet_of.mode}: {count} streams of {tokens} tokens: empty after {taken[0]:.2f} s; longest pause of a "
        f"stream {statistics.median(gaps):.0f} ms (median), {gaps[-1]:.0f} ms (worst); P computed "
        f"{p.delta(COMPUTED):.0f} tokens, the D that they left {left.delta(COMPUTED):.0f}, the other D "
        f"{d.delta(COMPUTED):.0f}, which read {d.delta(LOADED):.0f}; {dict(moved_streams(url))}"
    )
    assert Counter(one.verdict(other) for one, other in zip(streams, expected, strict=True)) == {"right": count}
    assert moved_streams(url) == {"moved": count}
    assert p.delta(COMPUTED) == 0
    assert left.delta(COMPUTED) <= count * BLOCK
    assert d.delta(COMPUTED) <= count
    return taken[0]


def has_nothing_held(fleet_of, seconds=20):
    for spec in fleet_of.specs:
        wait_until(lambda spec=spec: nothing_held(spec), seconds=seconds, what=f"{spec.name} is idle")


def test_streams_move(fleet_of, router):
    """All of them, with their KV cache: no token is lost, doubled, or computed again beyond a block."""
    move_all(fleet_of, router, 8, 500, seed=1, behind=20)
    has_nothing_held(fleet_of)


@pytest.mark.thorough  # minutes of two cores
def test_forty_long_streams_move(fleet_of, router):
    """A whole engine's work."""
    seconds = move_all(fleet_of, router, 40, 2000, seed=2, behind=100)
    has_nothing_held(fleet_of)

    assert seconds < 30  # 5 on an idle machine: docs/moving-streams.md says why that is not asserted


@contextlib.contextmanager
def frozen(child):
    """Stop an engine for the length of a block."""
    child.signal(signal.SIGSTOP)
    wait_stopped(*pids_of(child.pid))
    try:
        yield
    finally:
        child.signal(signal.SIGCONT)


def test_the_engine_that_drains_is_frozen(fleet_of, router):
    """Its streams are cut all the same; what it does not hand over is computed anew."""
    asked = list(bodies(8, 400, seed=3, salt="frozen"))
    expected = run(fleet_of.p0.base_url, bodies(8, 400, seed=3, salt="alone 3"))
    ended = []

    def drain():
        with frozen(fleet_of.children["d0"]):
            order(router, "drain", "decode-0", move=True)
            wait_until(lambda: moved_streams(router).total() >= 8, seconds=120, what="all have moved")
            ended.append(moved_streams(router))

    streams = all_at(router, "decode-0", "decode-1", asked, drain, behind=20)
    print(f"\n{fleet_of.mode}: frozen: {dict(ended[0])}")
    has_nothing_held(fleet_of)

    assert Counter(one.verdict(other) for one, other in zip(streams, expected, strict=True)) == {"right": 8}


def test_engines_are_both_at_the_same_time(fleet_of, start_router):
    """Each of two engines is P of one router's requests and D of the other's."""
    one = start_router(f"router-both-{fleet_of.mode}-1", [fleet_of.d0], [fleet_of.d1], args=MOVES)
    other = start_router(f"router-both-{fleet_of.mode}-2", [fleet_of.d1], [fleet_of.d0], args=MOVES)
    expected = run(fleet_of.p0.base_url, bodies(24, 60, seed=4, salt="alone 4"))
    asked = [
        (url, body) for url, salt in ((one, "one"), (other, "other")) for body in bodies(24, 60, seed=4, salt=salt)
    ]
    with Watch(fleet_of.d0) as d0, Watch(fleet_of.d1) as d1:
        found = run_at(asked)
    has_nothing_held(fleet_of)

    wrong = [verdict for at, one in enumerate(found) if (verdict := one.verdict(expected[at % 24])) != "right"]
    assert wrong == []
    for watch in (d0, d1):
        assert watch.delta("vllm:pdrelay_leases_granted_total") >= 24
        assert watch.delta("vllm:pdrelay_loads_total") >= 24


def test_the_router_dies_in_the_middle(fleet_of, start_router):
    """Clients lose their connections, and nothing of what they have got is wrong; the engines keep nothing for it."""
    count = 8
    env = {"ADMIN_API_KEY": ADMIN_KEY}
    name = f"router-move-{fleet_of.mode}-dies"
    command = router_command(name, [fleet_of.p0], [fleet_of.d0, fleet_of.d1], args=MOVES, env=env)
    child = fleet_of.fleet.start(command)
    url = base_url(command)
    fleet_of.fleet.wait_ready([child], timeout_s=30)
    wait_until(
        lambda: all(one["connector"] for one in rows(url).values()), seconds=30, what="the router knows all engines"
    )
    asked = list(bodies(count, 500, seed=6, salt="dies"))
    salt = "alone 6"
    expected = run(fleet_of.p0.base_url, bodies(count, 500, seed=6, salt=salt))

    def drain():
        order(url, "drain", "decode-0", move=True)
        wait_until(lambda: moved_streams(url)["moved"] >= 1, seconds=30, what="some have moved")
        child.signal(signal.SIGKILL)
        fleet_of.fleet.stop(child)

    order(url, "drain", "decode-1")
    found = run(url, asked, lambda: (order(url, "undrain", "decode-1"), drain()), behind=20)
    has_nothing_held(fleet_of, seconds=30 + 10)  # what nobody came for is kept for kv_lease_duration
    another = start_router(f"{name}-next", [fleet_of.p0], [fleet_of.d0, fleet_of.d1], args=MOVES, env=env)
    again = run(another, bodies(count, 500, seed=6, salt="dies"))

    verdicts = Counter(one.verdict(other) for one, other in zip(found, expected, strict=True))
    print(f"\n{fleet_of.mode}: router killed: {dict(verdicts)}")
    assert verdicts.keys() <= {"right", "broken"}
    assert verdicts["broken"] > 0
    assert Counter(one.verdict(other) for one, other in zip(again, expected, strict=True)) == {"right": count}


@pytest.mark.thorough
def test_the_target_dies_in_the_middle(fleet_of, router):
    """What it had not begun goes back, and what it had begun, too; at worst a client gets an error."""
    count = 12
    asked = list(bodies(count, 800, seed=5, salt="killed"))
    expected = run(fleet_of.p0.base_url, bodies(count, 800, seed=5, salt="alone 5"))
    victim = fleet_of.children["d1"]

    def drain():
        order(router, "drain", "decode-0", move=True)
        wait_until(lambda: moved_streams(router)["moved"] >= 1, seconds=30, what="some have moved")
        victim.signal(signal.SIGKILL)
        fleet_of.fleet.stop(victim)

    streams = all_at(router, "decode-0", "decode-1", asked, drain, behind=20)
    verdicts = Counter(one.verdict(other) for one, other in zip(streams, expected, strict=True))
    print(f"\n{fleet_of.mode}: target killed: {dict(verdicts)}; {dict(moved_streams(router))}")
    for spec in (fleet_of.p0, fleet_of.d0):
        wait_until(lambda spec=spec: nothing_held(spec), seconds=40, what=f"{spec.name} is idle")

    assert verdicts.keys() <= {"right", "honest"}
    assert verdicts["right"] > 0
