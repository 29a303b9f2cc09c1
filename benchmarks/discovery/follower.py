"""A router's discovery as a process of its own: follows the pods of an API, and prints when it has
seen what.

``view ENGINES AT`` after each LIST, ``event VERSION AT`` after each change, with the seconds of the
clock that all processes of this machine share; and, when its input ends, ``end {...}``: what the
second LIST has cost.
"""

import asyncio
import json
import random
import sys
import time

from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource
from pdrelay_proxy.features.kubernetes.client import Cluster, Kubernetes
from pdrelay_proxy.features.kubernetes.reflector import Collection, Reflector
from pdrelay_proxy.features.pods.pod import read_pod
from pdrelay_proxy.io.discovery.engine_objects import EngineObjects
from pdrelay_proxy.io.discovery.reconciler import Reconciler


def say(what, *values):
    sys.stdout.write(f"{what} {' '.join(map(str, values))}\n")
    sys.stdout.flush()


async def follow(url):
    registry = Registry()
    spent_s = []
    versions = []
    pods = EngineObjects(Reconciler(registry, [EngineSource.PODS], time.monotonic))

    def read(meta, raw):
        versions.append(meta.resource_version)
        return read_pod(meta, raw)

    class Observer:
        heard = pods.heard

        async def receive(self, objects):
            await pods.receive(objects)
            spent_s.append(time.process_time())
            versions.clear()
            say("view", len(registry.members()), time.monotonic())

    def changed(objects):
        pods.changed(objects)
        for version in versions:
            say("event", version, time.monotonic())
        versions.clear()

    what = Collection("/api/v1/namespaces/llm/pods")
    watch = Reflector(
        Kubernetes(Cluster(url, "llm")),
        what,
        read,
        Observer(),
        clock=time.monotonic,
        chance=random.random,
        changed=changed,
    )
    async with watch.running():
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    say("end", json.dumps({"list_cpu_ms": (spent_s[1] - spent_s[0]) * 1000}))


if __name__ == "__main__":
    asyncio.run(follow(sys.argv[1]))
