"""How long the router's work for a large fleet keeps its loop from requests: run as a process of its own.

2,000 engines of twelve revisions, while pods come and go, engines fail and come back, and requests for several models
choose engines. Beside them run what runs in a router: probes, the comparing with what sources say, and what reads
``/stats`` and ``/metrics``. It prints the nine longest steps of each of them: what the loop's thread computes for one
of its callbacks, in seconds of processor time; and how much slower this machine is now than at its best, because others
use its caches and the other half of its cores.
"""

import asyncio
import gc
import itertools
import json
import logging
import random
import time
from collections import defaultdict
from contextlib import AsyncExitStack

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.discovery.store_entries import entry_of
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.engine_metrics import Numbers
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource, Target, Wanted
from pdrelay_proxy.core.model import RequestId, Role, RoutingHints
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.policies.round_robin import RoundRobin
from pdrelay_proxy.core.routing.share_bound import ShareBounds
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.io.discovery.discovery import Discovery
from pdrelay_proxy.io.discovery.engine_changes import EngineChanges
from pdrelay_proxy.io.discovery.engine_objects import EngineObjects
from pdrelay_proxy.io.discovery.entries import Entries
from pdrelay_proxy.io.discovery.memory import MemoryStore
from pdrelay_proxy.io.discovery.reconciler import Reconciler
from pdrelay_proxy.io.metrics import Metrics
from pdrelay_proxy.io.probes.prober import Prober
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.io.status import Status
from pdrelay_proxy.settings import Settings

ENGINES = 2000
REVISIONS = 12
NAMES = 100
LEAST_LOOK_S = 1e-4  # a shorter step of that task is its begin
PODS, PATIENCE_S = 60, 100.0  # that are replaced; for so long at most
MODELS = frozenset(f"lora-{n}" for n in range(NAMES))


def kind_of(task):
    """Return what a task is judged with: by its name, or with all that have none and do the same.

    A probe is a task of one or two steps. Alone, its longest was judged in place of the fifth of nine.
    """
    name = task.get_name()
    return getattr(task.get_coro(), "__qualname__", name) if name.startswith("Task-") else name


class Checks:
    """Engines that are well, at once."""

    async def look(self, _instance, *, is_whole):
        """Return what each engine says anew."""
        return EngineCapabilities(frozenset(set(MODELS)), "0.32") if is_whole else EngineCapabilities()

    async def numbers(self, _instance):
        """Return what one with our connector shows."""
        return Numbers(
            EngineCapabilities(connector="pdrelay", protocol="4", fingerprint="0123456789abcdef", mode=EngineMode.PUSH),
            leases=0,
        )


def wanted(number, generation=0):
    """Return a pod: each next one in a place has another address, and the next revision."""
    role = (Role.PREFILL, Role.DECODE)[number % 2]
    revision = (number // 2 + generation) % REVISIONS
    target = Target.parse(f"http://10.{generation}.{number // 250}.{number % 250}:8100#revision=r{revision}")
    return Wanted(role, target, f"uid-{number}-{generation}")


class Fleet:
    """A router's parts, and what happens to them."""

    def __init__(self):
        settings = Settings(circuit_breaker_failures=1, ejection_time_s=0.5)
        clock = time.monotonic
        self.registry = Registry(settings)
        self.reconciler = Reconciler(self.registry, [EngineSource.PODS, EngineSource.STORE], clock)
        self.pods, entries = EngineObjects(self.reconciler), Entries(self.reconciler)
        store = MemoryStore(entries, max_engines=10)
        pairs = PairSelector(self.registry, GroupChoice(RoundRobin(), bounds=ShareBounds(self.registry)))
        self.fleet = LiveFleet(self.registry, pairs, PushCoordinates(at_once=True), clock)
        changes = EngineChanges(self.registry, self.reconciler, entries, store)
        self.discovery = Discovery(self.reconciler, store, changes)
        self.prober = Prober(self.registry, Checks(), settings, clock, random.random)
        self.telemetry = Telemetry(Counters(frozenset({"/v1/completions"})), clock)
        self.queue = Admission(settings)
        self.status = Status(self.telemetry, self.registry, self.queue, clock)
        self.metrics = Metrics(self.telemetry, self.registry, self.queue)
        self.asks = itertools.cycle(RoutingHints(name) for name in sorted(MODELS))
        self.places = itertools.cycle(range(0, ENGINES, 7))
        self.engines = {f"pod-{n}": wanted(n) for n in range(ENGINES)}
        self.generations = defaultdict(int)
        self.stored = Entries(Reconciler(Registry(), [EngineSource.STORE], clock))
        self.entries = {one.identity: entry_of(one) for one in self.engines.values()}
        self.entry_generations = itertools.count(1)
        self.longest = defaultdict(list)

    def fill(self):
        """Have all engines be there, and be known."""
        finish(self.pods.view_in_steps(self.engines))
        finish(self.stored.view_in_steps(dict(self.entries)))
        shown = {"connector": "pdrelay", "protocol": "4", "fingerprint": "0123456789abcdef", "mode": EngineMode.PUSH}
        for member in self.registry.members():
            name = member.instance.id
            self.registry.learn(name, EngineCapabilities(frozenset(set(MODELS)), "0.32", engine_id=name, **shown))
            member.life.seen(now=time.monotonic())

    def replaced(self):
        """Replace a pod by one of the next revision, and return it."""
        number = next(self.places)
        self.generations[number] += 1
        new = {f"pod-{number}": wanted(number, self.generations[number])}
        self.engines |= new
        return new

    def relist(self):
        """Hear of all pods anew, of which one is another, in steps."""
        self.replaced()
        return self.pods.view_in_steps(dict(self.engines))

    def list(self):
        """Hear of all pods for the first time, as a router does that has just started, in steps."""
        reconciler = Reconciler(Registry(), [EngineSource.PODS], time.monotonic)
        return EngineObjects(reconciler).view_in_steps(dict(self.engines))

    def store(self):
        """Hear for the first time of a store that has all engines, in steps."""
        return Entries(Reconciler(Registry(), [EngineSource.STORE], time.monotonic)).view_in_steps(dict(self.entries))

    def entry(self):
        """Hear of a store that has all engines, and in which one is another."""
        number, generation = next(self.places), next(self.entry_generations)
        self.entries[f"uid-{number}-0"] = entry_of(wanted(number, generation % 200))
        finish(self.stored.view_in_steps(dict(self.entries)))

    def fail(self):
        """Have an engine fail a request."""
        member = random.choice(self.registry.members())
        self.fleet.ended(member.instance, RequestId("r"), Failure.UNREACHABLE)

    def choose(self):
        """Choose engines for a request."""
        chosen = self.fleet.any_pair(next(self.asks), may_be_alone=True)
        for one in chosen:
            self.fleet.all_answered(one, (RequestId("r"),))

    def look(self):
        """Look at all engines, which always takes as long on an idle machine."""
        for _ in range(3):
            dict([(member.instance.id, member.facts) for member in self.registry.members()])  # noqa: C404

    async def every(self, pause_s, act):
        """Do something again and again; a generator is done in its steps."""
        while True:
            await asyncio.sleep(pause_s)
            for _ in act() or ():
                await asyncio.sleep(0)

    async def replace_pods(self):
        """Replace pods one after the other."""
        for _ in range(PODS):
            await asyncio.sleep(0.03)
            self.pods.changed(self.replaced())

    def time_steps(self):
        """Time each callback of the loop."""
        run, longest = asyncio.Handle._run, self.longest

        def timed(handle):
            task = getattr(handle._callback, "__self__", None)
            name = kind_of(task) if isinstance(task, asyncio.Task) else "others"
            before = time.thread_time()
            run(handle)
            longest[name].append(time.thread_time() - before)

        asyncio.Handle._run = timed

    async def run(self):
        """Return the longest steps."""
        self.fill()
        gc.collect()
        gc.freeze()  # as a router does
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.discovery.running())
            await stack.enter_async_context(self.prober.running())
            await asyncio.sleep(1.5)
            self.time_steps()
            work = {
                "choice": self.every(0.01, self.choose),
                "yardstick": self.every(0.02, self.look),
                "relist": self.every(0.4, self.relist),
                "list": self.every(1.0, self.list),
                "store": self.every(1.0, self.store),
                "entry": self.every(0.2, self.entry),
                "failure": self.every(0.1, self.fail),
                "status": self.every(0.3, self.status.in_steps),
                "metrics": self.every(0.4, lambda: self.metrics.pieces("text/plain")[0]),
            }
            tasks = [asyncio.create_task(one, name=name) for name, one in work.items()]
            pods = asyncio.create_task(self.replace_pods(), name="pod")
            done, _ = await asyncio.wait([pods, *tasks], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            for task in done:
                task.result()
        looks = sorted([took for took in self.longest.pop("yardstick") if took > LEAST_LOOK_S])
        longest = {name: sorted(steps, reverse=True)[:9] for name, steps in self.longest.items()}
        return {"slowdown": looks[len(looks) // 2] / looks[0], "longest": longest}


def main():
    """Print the longest steps by task."""
    logging.disable(logging.INFO)
    logging.getLogger("pdrelay_proxy").addHandler(logging.NullHandler())
    print(json.dumps(asyncio.run(Fleet().run())))


if __name__ == "__main__":
    main()
