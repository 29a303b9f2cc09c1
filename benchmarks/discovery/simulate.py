"""A simulated fleet: what 1,000 engines, 100 routers and 10,000 requests a second cost, by the
router's own parts.

``make sim-fleet`` writes docs/benchmarks/fleet.md and .json. Nothing is sent: the tables, policies,
reflector and reconciler of the router run as they are, on engines and pods that are made up. What
many routers do together is computed from that.
"""

import asyncio
import gc
import itertools
import json
import random
import time
import tracemalloc
from contextlib import asynccontextmanager
from dataclasses import replace

from benchmarks import page
from benchmarks.discovery import ready, report, shared_api
from benchmarks.discovery.pods import LIFE, line, pages_of, pod, role_of
from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.discovery.store_entries import entry_name, entry_of
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource, Key, Target, Wanted
from pdrelay_proxy.core.model import RequestId, Role, RoutingHints
from pdrelay_proxy.core.protocol.push import TRANSFER_POLICIES
from pdrelay_proxy.core.request_record import LegRecord, RequestRecord
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.pairing import PolicyPerLeg
from pdrelay_proxy.core.routing.policies.round_robin import RoundRobin
from pdrelay_proxy.core.routing.policy_parts import PolicyParts
from pdrelay_proxy.core.routing.prompt_memory import PromptMemory
from pdrelay_proxy.core.schemas import NamedMetrics
from pdrelay_proxy.features import pairs_within
from pdrelay_proxy.features.expected_ttft.core.engine_costs import EngineCosts
from pdrelay_proxy.features.expected_ttft.core.engine_speed import EngineSpeeds
from pdrelay_proxy.features.expected_ttft.core.expected_ttft import ExpectedTtft
from pdrelay_proxy.features.expected_ttft.settings import EXPECTED_TTFT
from pdrelay_proxy.features.expected_ttft.weighing import ITL_WEIGHT
from pdrelay_proxy.features.kubernetes.reflector import Collection, Reflector
from pdrelay_proxy.features.pods.pod import read_pod
from pdrelay_proxy.features.slices.core.slice_preference import SlicePreference
from pdrelay_proxy.features.slices.settings import SlicePairing, SliceSettings
from pdrelay_proxy.io.discovery.engine_objects import EngineObjects
from pdrelay_proxy.io.discovery.reconciler import Reconciler
from pdrelay_proxy.io.metrics import Metrics
from pdrelay_proxy.io.request_path.caches import Caches
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet, Loads
from pdrelay_proxy.io.request_path.policies import policy_of
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.settings import KvTransferMode, PolicyName, Settings

SIZES = (10, 100, 1000)  # engines, half of them of each role
ROUTERS = 100
ENGINES = 1000
RATE = 10_000.0
SLICES = (28, 250)  # racks of 72 engines, and NVLink domains of 8
LARGE = 2000  # engines of one router: what one change costs
BESIDE = (1, 4, 16)  # routers at one API server
PROMPT = random.Random(1).randbytes(2048).hex().encode()  # 4 KiB of JSON text
PATH = "/v1/completions"


def main():
    args = page.parser_of(__doc__, "100 engines and short looks").parse_args()
    page.end_as_by_ctrl_c()
    spent_s = 0.02 if args.quick else 0.2
    sizes = SIZES[:2] if args.quick else SIZES
    found = {
        "about": page.about(),
        "fleet": {"routers": ROUTERS, "engines": sizes[-1], "rate": RATE},
        "choices": {
            case: choices(sizes, spent_s, case) for case in ("one revision", "two revisions")
        },
        "request": request_cost(sizes[-1], spent_s),
        "members": {str(n): members(n) for n in sizes},
        "metrics": {str(n): exposition(n) for n in sizes},
        "discovery": asyncio.run(discovery(sizes[-1])),
        "change": change_of(LARGE if not args.quick else sizes[-1]),
        "beside": asyncio.run(beside_requests(LARGE if not args.quick else sizes[-1])),
        "bytes": wire(sizes[-1]),
        "shared": shared_api.measure(sizes[-1], routers=(1, 2) if args.quick else BESIDE),
    }
    if not args.quick:
        found["ready"] = ready.measure(LARGE, lost=LARGE // 10, requests_s=50, lasts_s=20.0)
    out = page.out_of(args, "fleet")
    page.write(found, out, report.parts)
    page.show(out)


def micros(call, spent_s, least=5):
    """Return the microseconds of processor time that a call takes at best: others may use this
    machine, too.
    """
    call()
    seen = []
    until = time.perf_counter() + spent_s
    gc.disable()
    try:
        while time.perf_counter() < until or len(seen) < least:
            before = time.thread_time()
            call()
            seen.append(time.thread_time() - before)
    finally:
        gc.enable()
    return min(seen) * 1e6


def target(number, role, revision):
    port = 8100 if role is Role.PREFILL else 8200
    return Target.parse(
        f"http://10.{number // 65536 + 1}.{number // 256 % 256}.{number % 256}:{port}#revision={revision}"
    )


def registry_of(count, case="one revision"):
    """Engines that are known and busy: ten requests each, give or take, and a fresh report of each
    prefill engine.
    """
    registry = Registry()
    dice = random.Random(1)
    now = time.monotonic()
    for number in range(count):
        role = Role.PREFILL if number % 2 == 0 else Role.DECODE
        revision = "r2" if case == "two revisions" and number % 4 >= 2 else "r1"
        (instance,) = registry.add_target(role, target(number, role, revision), now=now)
        registry.learn(instance.id, EngineCapabilities(frozenset({"m"}), "0.32.0", "pdrelay"))
        member = registry.member(instance.id)
        member.life.seen(now=now)
        for request in range(dice.randrange(8, 13)):
            member.load.enter(RequestId(f"{number}-{request}"))
        if role is Role.PREFILL:
            member.load.reported(NamedMetrics(dice.randrange(3), dice.random()), now=now + 1e6)
    return registry


def sliced(count, slices, pairing):
    """Engines of one revision in so many slices of equal sizes."""
    registry = Registry(Settings(), pairs_within(Settings().with_features(SliceSettings(pairing))))
    for number in range(count):
        role = Role.PREFILL if number % 2 == 0 else Role.DECODE
        one = replace(target(number, role, "r1"), slice=f"s{number // 2 % slices}")
        (instance,) = registry.add_target(role, one, now=0.0)
        registry.learn(instance.id, EngineCapabilities(frozenset({"m"}), "0.32.0", "pdrelay"))
    return registry


def choice_of(registry, policy):
    load = Loads(registry, time.monotonic).of
    caches = Caches(PromptMemory(1800.0), registry, time.monotonic)
    if policy is PolicyName.ROUND_ROBIN:
        return RoundRobin()
    if policy == EXPECTED_TTFT:
        costs = EngineCosts(
            registry, EngineSpeeds(), caches, time.monotonic, weight=ITL_WEIGHT, itl_most_s=None
        )
        return ExpectedTtft(costs, random.randrange)
    parts = PolicyParts(load, random.randrange, 0, caches)
    return PolicyPerLeg(policy_of(policy, parts), policy_of(policy, parts))


def fleet_of(registry, choice, preference=None):
    return LiveFleet(
        registry,
        PairSelector(registry, GroupChoice(choice), preference=preference),
        PushCoordinates(at_once=TRANSFER_POLICIES[KvTransferMode.AUTO].at_once),
        time.monotonic,
    )


def choices(sizes, spent_s, case):
    """Time what a request costs before its first leg: who may serve, who fits, who is chosen."""
    found = {}
    for policy in (*PolicyName, EXPECTED_TTFT):
        seen = found[str(policy)] = {}
        for count in sizes:
            registry = registry_of(count, case)
            turn = iter(range(10**9))
            fleet = fleet_of(registry, choice_of(registry, policy))

            def whole(turn=turn, fleet=fleet):
                hints = RoutingHints("m", f"session {next(turn) % 5000}", PROMPT)
                fleet.pair(fleet.usable(Role.PREFILL), fleet.usable(Role.DECODE), hints)

            def usable(fleet=fleet):
                return [fleet.usable(role) for role in Role]

            seen[str(count)] = {
                "whole": micros(whole, spent_s),
                "usable": micros(usable, spent_s / 2),
            }
    return found


def request_cost(count, spent_s):
    """Time what the tables do for a request beside the choice: slots, legs, health, counters."""
    registry = registry_of(count)
    fleet = fleet_of(registry, RoundRobin())
    turn = iter(range(10**9))
    telemetry = Telemetry(Counters(frozenset({PATH})), time.monotonic)
    prefill, decode = registry.known(Role.PREFILL)[0], registry.known(Role.DECODE)[0]

    def serve():
        request = RequestId(f"pdrelay-{next(turn):032x}")
        record = RequestRecord(
            request, PATH, prefill=LegRecord(prefill.id, 1.0), decode=LegRecord(decode.id, 1.0)
        )
        fleet.enter(decode, request)
        for instance in (prefill, decode):
            fleet.enter(instance, request)
            fleet.all_answered(instance, (request,))
            telemetry.legs_over(instance, [0.1], [0.2], 1.0)
            fleet.ended(instance, request, None)
        fleet.leave(decode, request)
        record.over(200, 1.0)
        telemetry.request_over(record)

    return {"tables": micros(serve, spent_s)}


def change_of(count):
    """Time the first choice after an engine has changed, which looks at all engines."""
    found = {}
    cases = {case: (registry_of(count, case), None) for case in ("one revision", "two revisions")}
    for pairing, slices in itertools.product((SlicePairing.REQUIRE, SlicePairing.PREFER), SLICES):
        registry = sliced(count, slices, pairing)
        preference = SlicePreference(registry) if pairing is SlicePairing.PREFER else None
        cases[f"{pairing} {slices}"] = registry, preference
    for case, (registry, preference) in cases.items():
        fleet = fleet_of(registry, RoundRobin(), preference)
        name = registry.known(Role.DECODE)[3].id
        turn = iter(range(10**9))

        def change(registry=registry, fleet=fleet, name=name, turn=turn):
            (registry.departures.drain if next(turn) % 2 else registry.departures.undrain)(
                name, now=0.0
            )
            fleet.any_pair(RoutingHints("m"))

        found[case] = micros(change, 0.1) / 1000
    return {"engines": count, "ms": found}


async def beside_requests(count, requests_s=200, events_s=20, lasts_s=3.0):
    """Measure how long others wait for the loop while requests choose engines and pods come and go:
    wall time.
    """
    api = Api(pages_of(pod(number, role=role_of(number)) for number in range(count)))
    registry = Registry()
    fleet = fleet_of(registry, RoundRobin())
    waits = []
    ends = time.monotonic() + lasts_s

    async def every(pause_s, call):
        while time.monotonic() < ends:
            call()
            await asyncio.sleep(pause_s)

    async def look():  # as a GET /ready waits for its turn
        while time.monotonic() < ends:
            before = time.perf_counter()
            await asyncio.sleep(0)
            waits.append((time.perf_counter() - before) * 1000)
            await asyncio.sleep(0.002)

    async with following(api, registry):
        await until(lambda: len(registry.members()) == count)
        lines = itertools.cycle(rollout(max(1, count // 10)))
        ask = RoutingHints("m")
        settle()
        await asyncio.gather(
            every(1 / requests_s, lambda: fleet.any_pair(ask)),
            every(1 / events_s, lambda: api.lines.put_nowait([next(lines)])),
            look(),
        )
    waits.sort()
    return {
        "engines": count,
        "requests_s": requests_s,
        "events_s": events_s,
        "p99": waits[len(waits) * 99 // 100],
        "most": waits[-1],
    }


def members(count):
    """Time adding and removing an engine, and weigh it."""
    gc.collect()
    tracemalloc.start()
    registry = registry_of(count)
    weight = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    new = target(10**6, Role.DECODE, "r1")

    def come_and_go():
        (instance,) = registry.add_target(Role.DECODE, new, now=0.0)
        registry.remove(instance.id, now=0.0)

    return {"add_and_remove": micros(come_and_go, 0.1), "bytes": weight}


def exposition(count):
    """Time one scrape of a router, and weigh it."""
    registry = registry_of(count)
    telemetry = Telemetry(Counters(frozenset({PATH})), time.monotonic)
    for member in registry.members():
        telemetry.legs_over(member.instance, [0.1], [0.2], 1.0)
    metrics = Metrics(telemetry, registry, Admission(Settings()))

    def scrape():
        pieces, content_type = metrics.pieces("text/plain")
        return b"".join(pieces), content_type

    def longest():
        pieces, _ = metrics.pieces("text/plain")
        seen = []
        while True:
            before = time.thread_time()
            if next(pieces, None) is None:
                return max(seen) * 1000
            seen.append(time.thread_time() - before)

    whole = {"ms": micros(scrape, 0.1, 3) / 1000, "bytes": len(scrape()[0])}
    settle()
    return whole | {"piece_ms": min(longest() for _ in range(3))}


class Api:
    """Stands where the client of the Kubernetes API stands, and says what it is told to; nothing is
    sent.
    """

    namespace = "llm"

    def __init__(self, pages):
        self.pages = pages
        self.lines = asyncio.Queue()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def get(self, _path, query):
        number = int(query.get("continue", "0"))
        await asyncio.sleep(0)
        return self.pages[number]

    async def watch(self, _path, _query, *, silence_s):
        while True:
            yield await self.lines.get()
            await asyncio.sleep(0)  # as a socket would


@asynccontextmanager
async def following(api, registry):
    """Run the reflector and the reconciler over it."""
    reconciler = Reconciler(registry, [EngineSource.PODS], time.monotonic)
    pods = EngineObjects(reconciler)
    reflector = Reflector(
        api,
        Collection("/api/v1/namespaces/llm/pods"),
        read_pod,
        pods,
        clock=time.monotonic,
        chance=lambda: 0.5,
        changed=pods.changed,
    )
    async with reflector.running():
        yield reconciler


@asynccontextmanager
async def blocking():
    """Note the longest time in which nothing else could run (ms), and the processor time of all of
    it (s).
    """
    seen = {"longest": 0.0}

    async def tick():
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            seen["longest"] = max(seen["longest"], (time.thread_time() - before) * 1000)

    task = asyncio.create_task(tick())
    before = time.thread_time()
    try:
        yield seen
    finally:
        seen["busy"] = time.thread_time() - before
        task.cancel()
        await asyncio.wait((task,))


def settle():
    """Collect what earlier parts have left: else the collector's pauses would be theirs, and count
    here.
    """
    gc.collect()
    gc.freeze()


async def until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the simulation does not get there")
        await asyncio.sleep(0.02)


async def discovery(count):
    """List, and then change, all pods."""
    found = {}
    for many in (count * 2 // 5, count):
        api = Api(pages_of(pod(number, role=role_of(number)) for number in range(many)))
        registry = Registry()
        settle()
        async with blocking() as found[f"list {many}"], following(api, registry):
            await until(lambda registry=registry, many=many: len(registry.members()) == many)

    def here(revision):
        return sum(
            1
            for m in registry.members()
            if m.origin.wanted and m.facts.revision == revision and not m.retires
        )

    async with following(api, registry):
        await until(lambda: api.lines.qsize() == 0 and len(registry.members()) == count)
        await asyncio.sleep(0.05)
        lines = [line("MODIFIED", pod(n, role=role_of(n), version=10 + n)) for n in range(count)]
        settle()
        async with blocking() as found["quiet"]:
            for one in lines:
                api.lines.put_nowait([one])
            await until(api.lines.empty)
        some = count // 10
        lines = rollout(some)
        settle()
        async with blocking() as found["rollout"]:
            for one in lines:
                api.lines.put_nowait([one])
            await until(lambda: api.lines.empty() and here("r2") == some)
    found["rollout"] |= {"events": len(lines), "pods": some}
    found["quiet"]["events"] = count
    return found


def rollout(count):
    """All events of a rolling update: each pod leaves and goes, and another comes."""
    version = iter(range(100_000, 10**9))
    lines = []
    for n in range(count):
        role = role_of(n)
        new = {"role": role_of(n), "revision": "r2"}
        lines += [
            line(
                "ADDED" if at == 0 else "MODIFIED",
                pod(n + 10_000, phase=phase, version=next(version), **new),
            )
            for at, phase in enumerate(LIFE)
        ]
        leaving = pod(n, role=role, phase="leaving", version=next(version))
        lines += [
            line("MODIFIED", leaving),
            line(
                "DELETED",
                {
                    **leaving,
                    "metadata": {**leaving["metadata"], "resourceVersion": str(next(version))},
                },
            ),
        ]
    return lines


def wire(count):
    """Weigh what is sent."""
    whole = [pod(number, role=role_of(number)) for number in range(count)]
    life = [line("MODIFIED", pod(1, phase=phase)) for phase in (*LIFE, "leaving")]
    wanted = Wanted(Role.DECODE, target(count, Role.DECODE, "r1"))
    name = entry_name(Key(wanted.role, wanted.target.address.authority))
    text = entry_of(wanted)
    return {
        "pod": len(line("ADDED", whole[0])),
        "list": sum(map(len, pages_of(whole))),
        "life": sum(map(len, life)) + len(life[-1]),  # DELETED says it once more
        "entry": len(json.dumps({name: text})) - 2,
        "changes": len(json.dumps({"data": {name: entry_of(replace(wanted, leaves=True))}})),
    }


if __name__ == "__main__":
    main()
