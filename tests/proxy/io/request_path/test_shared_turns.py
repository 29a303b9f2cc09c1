"""Workers of one router, and engines that turn: what each knows of the others, one that begins later too."""

from collections import Counter

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.target import EngineSource, Target, Wanted
from pdrelay_proxy.core.model import EngineRole, InstanceId, RequestId, Role
from pdrelay_proxy.core.workers.worker_health import WorkerHealth, bulletin_of
from pdrelay_proxy.io.discovery.reconciler import Entries, Pods, Reconciler
from pdrelay_proxy.io.request_path.id_log import InstanceIdLog
from pdrelay_proxy.io.request_path.shared_registry import SharedRegistry
from pdrelay_proxy.settings import Settings

PREFILL, DECODE, BOTH = EngineRole
D0, BUSY = InstanceId("decode-0"), RequestId("busy")
POD = Wanted(Role.DECODE, Target.parse("pod:80"), "uid")


def assigned(at, role, identity=""):
    """Return what a store has of an engine that serves a role."""
    text = f'{{"declared":"decode","at":"{at}:80","serves":"{role}","identity":"{identity}"}}'
    return {f"turn.decode.{at}_3a80": text}


class Worker:
    """One worker with two decode engines, and what it hears."""

    def __init__(self, folder, number, *, pods=False):
        self.number = number
        self.registry = SharedRegistry(Settings(), InstanceIdLog(folder / "ledger"), counts=number == 0)
        for host in ("d", "e"):
            self.registry.add(Role.DECODE, Address("http", host, 80), now=0.0)
        self.peers = WorkerHealth(self.registry)
        self.registry.is_drained_elsewhere = self.peers.is_drained
        sources = [EngineSource.STORE, *([EngineSource.PODS] if pods else [])]
        self.reconciler = Reconciler(self.registry, sources, lambda: 0.0)
        self.entries, self.pods = Entries(self.reconciler), Pods(self.reconciler)

    def role(self, name=D0):
        return self.registry.member(name).role


def crew(folder, *entries, **options):
    """Start a worker after the other; each hears the store when it begins."""
    found = []
    for number in range(2):
        worker = Worker(folder, number, **options)
        for entry in entries or ({},):
            worker.entries.view(entry)
        worker.registry.begin(now=0.0)
        found.append(worker)
    return found


def talk(*workers, rounds=4):
    """Have them tell each other all they know, and settle, some times."""
    for now in range(1, rounds + 1):
        for worker in workers:
            for other in workers:
                if other is not worker:
                    worker.peers.hear(bulletin_of(other.number, other.registry), now=float(now))
        for worker in workers:
            worker.registry.settle(patience_s=0, now=float(now))
            worker.registry.follow(now=float(now))


@pytest.mark.parametrize("again", [0, 1])
def test_a_worker_that_is_started_during_a_turn_turns_with_the_others(tmp_path, again):
    """It has nothing at the engine, but the others do: it must not hold them up, nor send legs of the new role."""
    workers = crew(tmp_path)
    stays = workers[1 - again]
    stays.registry.member(D0).load.enter(BUSY)
    for worker in workers:
        worker.entries.view(assigned("d", PREFILL))
    new = Worker(tmp_path, again)
    new.entries.view(assigned("d", PREFILL))
    new.registry.begin(now=0.0)
    talk(stays, new)
    assert (stays.role(), new.role()) == (DECODE, DECODE)
    assert new.registry.member(D0).heading is PREFILL
    stays.registry.member(D0).load.leave(BUSY)
    talk(stays, new)

    assert (stays.role(), new.role()) == (PREFILL, PREFILL)
    assert sum([worker.registry.turns for worker in (stays, new)], start=Counter()) == {("prefill", "turned"): 1}


@pytest.mark.parametrize("again", [0, 1])
def test_a_pod_that_turns_is_heard_of_after_the_store(tmp_path, again):
    """A worker that is started meanwhile hears its sources in any order."""
    workers = crew(tmp_path, pods=True)
    for worker in workers:
        worker.pods.view({"pod": POD})
    name = InstanceId("decode-2")
    stays = workers[1 - again]
    stays.registry.member(name).load.enter(BUSY)
    for worker in workers:
        worker.entries.view(assigned("pod", PREFILL, "uid"))
    new = Worker(tmp_path, again, pods=True)
    new.entries.view(assigned("pod", PREFILL, "uid"))
    new.registry.begin(now=0.0)
    new.pods.view({"pod": POD})
    talk(stays, new)
    assert (stays.role(name), new.role(name)) == (DECODE, DECODE)
    stays.registry.member(name).load.leave(BUSY)
    talk(stays, new)

    assert (stays.role(name), new.role(name)) == (PREFILL, PREFILL)


@pytest.mark.parametrize("role", [PREFILL, BOTH])
def test_all_workers_of_a_router_that_starts_serve_what_the_store_says_at_once(tmp_path, role):
    """None of them has anything there; and a worker that is started later finds the same."""
    workers = crew(tmp_path, assigned("d", role))
    workers.append(Worker(tmp_path, 0))
    workers[-1].entries.view(assigned("d", role))
    workers[-1].registry.begin(now=0.0)

    assert [worker.role() for worker in workers] == [role] * 3
    assert [worker.registry.member(D0).turn for worker in workers] == [None] * 3
    assert not any(worker.registry.turns for worker in workers)


def test_a_pod_that_comes_and_has_turned_serves_that_at_all_workers_at_once(tmp_path):
    """It was away; the one that sees it first tells the others."""
    workers = crew(tmp_path, assigned("pod", PREFILL, "uid"), pods=True)
    for worker in workers:
        worker.pods.view({"pod": POD})

    assert [worker.role(InstanceId("decode-2")) for worker in workers] == [PREFILL, PREFILL]


def turned_there_and_back(folder, *roles):
    """Two workers whose engine has turned to some roles, one after the other."""
    workers = crew(folder)
    for role in roles:
        for worker in workers:
            worker.entries.view({} if role is DECODE else assigned("d", role))
        talk(*workers)
    return workers


def test_a_worker_that_is_started_again_counts_no_turn_of_before(tmp_path):
    """Worker 0 counts; the one that follows it reads in the ledger what has been since the router started."""
    workers = turned_there_and_back(tmp_path, PREFILL, DECODE, PREFILL)
    assert workers[0].registry.turns == {("prefill", "turned"): 2, ("decode", "turned"): 1}
    new = Worker(tmp_path, 0)
    new.entries.view(assigned("d", PREFILL))
    changes = new.registry.changes.count
    new.registry.begin(now=9.0)

    assert new.role() is PREFILL
    assert (new.registry.turns, new.registry.changes.count) == ({}, changes)


@pytest.mark.parametrize("store_first", [True, False])
def test_a_turn_of_before_does_not_end_one_that_is_under_way(tmp_path, store_first):
    """The ledger says that it has turned to prefill and back; now it turns to prefill again."""
    workers = turned_there_and_back(tmp_path, PREFILL, DECODE)
    stays = workers[1]
    stays.registry.member(D0).load.enter(BUSY)
    stays.entries.view(assigned("d", PREFILL))
    new = Worker(tmp_path, 0)
    steps = [lambda: new.entries.view(assigned("d", PREFILL)), lambda: new.registry.begin(now=9.0)]
    for step in steps if store_first else reversed(steps):
        step()

    assert (new.role(), new.registry.member(D0).heading, new.registry.turns) == (DECODE, PREFILL, {})
