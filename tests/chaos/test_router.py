"""The router before engines that die, hang and break connections off, in every phase of a request, while 200 run.

Two prefill and two decode engines; one of each is the victim. Every request ends with the reference's text or with an
honest error, within its timeout, and the engines that live hold nothing afterwards.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import httpx
import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector, Role
from support.cluster import OVER_TCP, base_url, engine_spec, router_command, wait_until
from support.storm import fates, judge, salt, storm, texts
from support.valves import Passing, Valve, open_valves
from support.victims import LONG, Victim, reuse_blocks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

REQUESTS = 200
TOTAL, FIRST, IDLE = 20, 5, 3  # s, the router's timeouts
LIMITS = {
    "connect-timeout": 1, "first-token-timeout": FIRST, "stream-idle-timeout": IDLE, "total-timeout": TOTAL,
    "health-check-interval": 0.5,
}  # fmt: skip
LEASE, TRANSFER = 3.0, 4.0  # s, the engines'; of one that is late the request is computed, or sent, once more
# Where nothing hangs, no engine may be taken for hung, however busy it is. That one was killed shows behind a valve
# when its stream is idle.
PATIENCE = 60  # s
PATIENT = LIMITS | {
    **dict.fromkeys(("first-token-timeout", "total-timeout"), PATIENCE), "stream-idle-timeout": 10,
}  # fmt: skip
_routers = itertools.count()
MODES = ("pull", "push")


@dataclass
class Four:
    """Two engines of each role, and the valve in front of each."""

    engines: dict[str, Victim]
    valves: dict[str, Valve]

    def ready(self):
        """Start what is dead, open every valve, and wait until all are at rest."""
        for name, engine in self.engines.items():
            engine.start()
            self.valves[name].open()
            self.valves[name].release()
        fleet = next(iter(self.engines.values())).fleet
        fleet.wait_ready([engine.child for engine in self.engines.values()], timeout_s=300)
        self.rest()

    def rest(self):
        """P's blocks are back, also those of a D that is no more: its lease runs out."""
        for name, engine in self.engines.items():
            if engine.child.alive:
                wait_until(lambda engine=engine: engine.at_rest, seconds=LONG, what=f"{name} is at rest")

    @contextmanager
    def router(self, *args, limits=LIMITS):
        """Start a router that reaches the engines through their valves."""
        fleet = self.engines["p0"].fleet
        limits = [word for name, value in limits.items() for word in (f"--{name}", str(value))]
        sides = [[self.valves[name] for name in names] for names in (("p0", "p1"), ("d0", "d1"))]
        command = router_command(f"router-chaos-{next(_routers)}", *sides, args=[*limits, *args])
        child = fleet.start(command)
        try:
            fleet.wait_ready([child], timeout_s=30)
            wait_until(lambda: all_ready(base_url(command)), seconds=20, what="the router has seen all engines")
            yield base_url(command).removeprefix("http://")
            assert child.alive, child.tail()
        finally:
            fleet.stop(child)


def all_ready(url):
    states = [row["state"] for row in httpx.get(f"{url}/stats", trust_env=False).json()["instances"]]
    return states == ["healthy"] * 4


@pytest.fixture(scope="module")
def four_engines(request, fleet, model):
    config = {"kv_lease_duration": LEASE, "transfer_timeout": TRANSFER, "registration_timeout": TRANSFER}
    config |= {"handshake_timeout": 2, "retry_after": 0.1}
    # A valve cannot tell an engine that closes what was idle for five seconds from one that breaks off, and both meet
    # requests and answers that are held there for as long as a busy machine takes.
    env = {**OVER_TCP, "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120"}
    common = {"connector": Connector.PDRELAY, "mode": TransferMode(request.param), "extra_connector_config": config}
    common |= {"extra_env": env}
    roles = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
    engines = {
        name: Victim(engine_spec(f"{name}-{request.param}-routed", model, role=role, kv_cache_mib=32, **common), fleet)
        for name, role in roles.items()
    }
    with ExitStack() as stack:
        valves = stack.enter_context(open_valves([engine.spec for engine in engines.values()]))
        stack.callback(lambda: fleet.stop(*(e.child for e in engines.values() if e.child in fleet.children)))
        yield Four(engines, dict(zip(engines, valves, strict=True)))


@pytest.fixture
def four(four_engines):
    four_engines.ready()
    return four_engines


@pytest.fixture(scope="module")
def drops():
    return storm(REQUESTS, seed=100)


@pytest.fixture(scope="module")
def expected(reference, drops):
    return texts(reference.address, drops)


# A phase is where the request is that springs the trap: (the engine whose valve sees it, what passes, seconds later).
PHASES = {
    "before": None,
    "prefill": ("p", Passing.REQUEST, 0.01),  # P has the request and computes
    "handoff": ("d", Passing.REQUEST, 0.0),  # P has answered, D has not got a byte yet
    "decode": ("d", Passing.ANSWER, 0.0),  # D has its first token
}
FAULTS = ("kill", "stop", "reset")
VICTIMS = ("p1", "d1")
MIDDLE = 30  # the so many-th request or answer at one of two engines


@contextmanager
def struck(four, victim, fault, phase, *, number=MIDDLE):
    """Do it to an engine when a request is in that phase; whatever was done is undone afterwards."""
    engine, valve = four.engines[victim], four.valves[victim]
    sprung = []

    def strike():
        sprung.append(phase)
        if fault == "kill":
            engine.child.signal(9)
        elif fault == "stop":
            engine.freeze()
        else:
            valve.close()
            valve.loop.call_later(2, valve.open)

    if PHASES[phase] is None:
        strike()
    else:
        role, what, after = PHASES[phase]
        where = victim if victim.startswith(role) else f"{role}1"
        four.valves[where].on(what, number, strike, after=after)
    try:
        yield
        assert sprung == [phase]
    finally:
        if fault == "kill":
            engine.kill()
        elif fault == "stop":
            engine.thaw()


# Of the matrix, ``make test-all`` has every phase in both modes, and every fault of either victim.
ORDINARY = {
    ("kill", "p1", "before", "pull"),
    ("kill", "d1", "decode", "pull"),
    ("stop", "d1", "handoff", "pull"),
    ("reset", "d1", "prefill", "pull"),
    ("kill", "p1", "decode", "push"),
    ("stop", "p1", "handoff", "push"),
    ("reset", "p1", "prefill", "push"),
    ("reset", "d1", "before", "push"),
}
# Of what has no phases, each way to fail in one mode.
IN_ONE_MODE = {
    ("reset while it reads", "push"),
    ("reset as it answers", "pull"),
    ("500 in place of its answer", "push"),
    ("kill", "pull"),
    ("reset", "push"),
}


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``."""
    mode = params["four_engines"]
    fault = params.get("fault") or params["how"]
    if "phase" not in params:
        return (fault, mode) not in IN_ONE_MODE
    return (fault, params["victim"], params["phase"], mode) not in ORDINARY


@pytest.mark.parametrize("four_engines", MODES, indirect=True, scope="module")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_while_200_requests_run(four, drops, expected, fault, victim, phase):
    with four.router() as address:
        with struck(four, victim, fault, phase):
            found = fates(address, drops, seconds=TOTAL + FIRST + 2, cache_salt=salt())
        counts, bad = judge(found, expected)
    print(f"\n{fault} {victim} {phase}: {dict(counts)}, slowest {max(fate.seconds for fate in found):.1f} s")
    for fate in found:
        if fate.error:
            print("   ", fate.drop.stream, fate.status, fate.error)

    assert bad == []
    assert counts["right"] >= 0.8 * REQUESTS
    four.rest()


HTTP_500 = b"HTTP/1.1 500 No\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
RETRY_FREELY = ("--retry-budget-ratio", "1", "--circuit-breaker-failures", "0")


@pytest.mark.parametrize("four_engines", MODES, indirect=True, scope="module")
@pytest.mark.parametrize("how", ["reset while it reads", "reset as it answers", "500 in place of its answer"])
def test_blocks_are_reused_between_a_failed_decode_and_its_retry(four, reference, how):
    """The blocks of the first try are another prompt's when the second one comes: a router that sent the same params
    again would have a decode engine read those, and answer 200 with wrong text."""
    drops = storm(12, seed=700, tokens=(8,), lengths=(150, 220))
    expected = texts(reference.address, drops)
    prefills, decodes = ([four.valves[name] for name in names] for names in (("p0", "p1"), ("d0", "d1")))
    # Legs are held here while engines compute what fills their caches: that takes as long as it takes.
    with four.router(*RETRY_FREELY, limits=PATIENT) as address, ThreadPoolExecutor(1) as pool:
        for valve in decodes:
            valve.hold(Passing.ANSWER)
        before = total(prefills, Passing.REQUEST)
        legs = {what: total(decodes, what) for what in Passing}
        asking = pool.submit(fates, address, drops, at_once=12, seconds=PATIENCE + 2, cache_salt=salt())
        what = Passing.REQUEST if "reads" in how else Passing.ANSWER
        wait_until(
            lambda: total(decodes, what) >= legs[what] + 12, seconds=LONG, what="all are at their decode engines"
        )
        wait_until(
            lambda: total(prefills, Passing.REQUEST) >= before + 12, seconds=LONG, what="and at their prefill ones"
        )
        for valve in prefills:
            valve.hold(Passing.REQUEST)
        before = total(prefills, Passing.REQUEST)
        for valve in decodes:
            fail(valve, how)
        wait_until(lambda: total(prefills, Passing.REQUEST) >= before + 12, seconds=LONG, what="all are sent once more")
        for name in ("p0", "p1"):
            reuse_blocks(four.engines[name])
        for valve in prefills:
            valve.release()
        found = asking.result()
    counts, bad = judge(found, expected)

    assert bad == []
    assert [(fate.status, fate.error) for fate in found if fate.error] == []
    assert counts == {"right": 12}
    four.rest()


def total(valves, what):
    return sum(valve.seen[what] for valve in valves)


def fail(valve, how):
    if "500" in how:
        valve.answer_instead(HTTP_500)
    else:
        valve.reset()
    valve.release()


@pytest.mark.parametrize("four_engines", MODES, indirect=True, scope="module")
@pytest.mark.parametrize("fault", ["kill", "reset"])
def test_streams_are_resumed_on_another_decode_engine(four, reference, fault):
    """Half of 40 streams break off: with --resume-streams no client notices, and every text is the unbroken one."""
    drops = [replace(drop, stream=True) for drop in storm(40, seed=400, tokens=(60,), lengths=(40, 120))]
    expected = texts(reference.address, drops)
    with four.router("--resume-streams", "true", *RETRY_FREELY, limits=PATIENT) as address:
        with struck(four, "d1", fault, "decode", number=15):
            found = fates(address, drops, at_once=40, seconds=PATIENCE + 2, cache_salt=salt())
        counts, bad = judge(found, expected)
        page = httpx.get(f"http://{address}/metrics", trust_env=False).text
    print(counts, [line for line in page.splitlines() if "resum" in line or "retr" in line])

    assert bad == []
    assert counts == {"right": 40}, [fate.error for fate in found if fate.error]
    four.rest()
