"""How long a reflector keeps its loop from others: run as a process of its own, with the address of an API to list.

It lists three times, and prints the longest blocks in seconds of processor time, the longest first.
"""

import asyncio
import random
import sys
import time

from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource
from pdrelay_proxy.features.kubernetes.client import Cluster, Kubernetes
from pdrelay_proxy.features.kubernetes.reflector import Collection, Reflector, WatchTimes
from pdrelay_proxy.features.pods.pod import read_pod
from pdrelay_proxy.io.discovery.engine_objects import EngineObjects
from pdrelay_proxy.io.discovery.reconciler import Reconciler

VIEWS = 3
RELIST_S = 0.5
PATIENCE_S = 150
SHOWN = 5


class Counting(EngineObjects):
    """Passes on what there is, and counts how often."""

    def __init__(self, reconciler):
        super().__init__(reconciler)
        self.views = 0

    def view_in_steps(self, objects, /):
        yield from super().view_in_steps(objects)
        self.views += 1


async def gaps_of(url):
    """Fill a registry from the pods of an API; return it, and what the loop's thread computed between two ticks."""
    registry = Registry()
    gaps = []
    told = Counting(Reconciler(registry, [EngineSource.PODS], time.monotonic))
    what = Collection("/api/v1/namespaces/default/pods", {"labelSelector": "app=pdrelay"})
    options = {"clock": time.monotonic, "chance": random.random, "rhythm": WatchTimes(relist_s=RELIST_S)}
    async with (
        asyncio.timeout(PATIENCE_S),
        Kubernetes(Cluster(url, "default")) as client,
        Reflector(client, what, read_pod, told, **options).running(),
    ):
        while told.views < VIEWS:
            before = time.thread_time()  # a busy machine is no failure: what others take from the thread does not count
            await asyncio.sleep(0)
            gaps.append(time.thread_time() - before)
    return registry, gaps


def main():
    """Print how many engines were found, and the longest gaps."""
    registry, gaps = asyncio.run(gaps_of(sys.argv[1]))
    print(len(list(registry.members())), *sorted(gaps, reverse=True)[:SHOWN])


if __name__ == "__main__":
    main()
