"""What a message costs an engine that holds many leases, and a decode engine whose queue is
aborted.

``nice .venv/bin/python -m benchmarks.connector.leases`` prints the table of
docs/benchmarks/connector.md: the cores alone, with a link that goes nowhere. Each figure is CPU
time of the thread, and the median of three runs.
"""

import gc
import statistics
import time

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, BlockId, ConnId, EngineId, RequestId
from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.lease.kv_params import PullParams
from pdrelay_connector.core.lease.lease_table import LeaseTable
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import (
    PROTOCOL,
    RankMemory,
    ReadDone,
    RegisterPush,
    RenewLeases,
    StagePart,
    Welcome,
)
from pdrelay_connector.core.ports import ConnectionLost, MessageReceived, PeerConnected
from pdrelay_connector.core.push.decode_scheduler import PushReceiver
from pdrelay_connector.core.push.expected_push import PushOrder
from pdrelay_connector.core.push.prefill_scheduler import PushCoordinator
from pdrelay_connector.core.session.peers import PeerTable
from pdrelay_connector.core.session.worker_links import WorkerLinks
from pdrelay_connector.core.staging.prefill_scheduler import StagingCoordinator
from pdrelay_connector.core.staging.slots import Slots
from support.engines import FINGERPRINT, lent, rank_info

SIZES = (1000, 5000, 20000)
RUNS = 3
MESSAGES = 100
ABORTS = 8000
D = ConnId(1)
ELSE = ConnId(2)
P = EngineId("p0")


class Nowhere:
    """A link that sends nothing."""

    def __init__(self):
        self.met = 0

    def connect(self, peer, engine):
        self.met += 1
        return ConnId(self.met)

    def engine_of(self, conn):
        return None

    def send(self, conn, message):
        pass

    def close(self, conn):
        pass


def name(number):
    return RequestId(f"cmpl-{number:08d}")


def renewed(lease_manager, many):
    """Grant so many leases and have one connection claim them; the last hundred are another's."""
    for number in range(many):
        lease_manager.grant(name(number), now=number * 1e-4)
    claimed, rest = [name(n) for n in range(many - 100)], [name(n) for n in range(many - 100, many)]
    lease_manager.renew(D, claimed, now=10.0)
    lease_manager.renew(ELSE, rest, now=10.0)
    lease_manager.take_released()


def lender_of(many):
    lease_manager = LeaseManager(Nowhere(), LeaseTable(duration=30.0, extension=20.0), Counters())
    renewed(lease_manager, many)
    return lease_manager


def a_done(many):
    lease_manager = lender_of(many)
    return [
        lambda n=n: lease_manager.on(MessageReceived(D, ReadDone(name(n), name(n), 0, 1)), now=10.0)
        for n in range(MESSAGES)
    ]


def a_renewal_of_one(many):
    lease_manager = lender_of(many)
    return [
        lambda n=n: lease_manager.on(MessageReceived(D, RenewLeases((name(n),))), now=11.0)
        for n in range(MESSAGES)
    ]


def a_lost_connection_with_100_leases(many):
    lease_manager = lender_of(many)
    return [lambda: lease_manager.on(ConnectionLost(ELSE, "gone"), now=10.0)]


def a_done_where_parts_are_staged(many):
    link = Nowhere()
    counters = Counters()
    lease_manager = lender_of(many)
    staging_coordinator = StagingCoordinator(
        link,
        lease_manager,
        counters,
        WorkerLinks(link, {0: b""}),
        Slots([16]),
        blocks=1 << 20,
        read_timeout=60.0,
    )
    for number in range(many - 100):
        order = StagePart(name(number), name(number), 0, 2, 0, ((BlockId(1),),))
        staging_coordinator.on(MessageReceived(D, order), now=10.0)

    def done(number):
        staging_coordinator.on(
            MessageReceived(D, ReadDone(name(number), name(number), 0, 1)), now=10.0
        )
        staging_coordinator.advance(now=10.0)
        staging_coordinator.released(lease_manager.take_released())

    return [lambda n=n: done(n) for n in range(MESSAGES)]


def a_registration(many):
    lease_manager = LeaseManager(Nowhere(), LeaseTable(duration=30.0, extension=20.0), Counters())
    pushes = PushCoordinator(
        Nowhere(), lease_manager, Counters(), tokens={0: b""}, registration_timeout=480.0
    )
    pushes.on(MessageReceived(D, RankMemory(rank_info("d", blocks=1 << 20))), now=0.0)
    for guest in range(100):  # as many decode engines
        pushes.on(
            MessageReceived(ConnId(10 + guest), RankMemory(rank_info("d", blocks=1 << 20))), now=0.0
        )

    def register(number):
        pushes.on(
            MessageReceived(D, RegisterPush(name(number), name(number), None, lent(0, [1]))),
            now=0.0,
        )

    for number in range(many):
        register(number)
    return [lambda n=n: register(many + n) for n in range(MESSAGES)]


def a_turn_that_waits_for_pushes(many):
    harness = Harness(many)
    push_receiver = PushReceiver(
        harness.link, harness.peers, harness.lease_renewer, Counters(), [rank_info("d")],
        timeout=480.0, peer_timeout=30.0,
    )  # fmt: skip
    for number in range(many):
        push_receiver.expect(
            PushOrder(name(number), name(number), P, Address("h", 1), None, lent(0, [1])), now=0.0
        )
    push_receiver.advance(now=1.0)
    return [lambda: push_receiver.advance(now=1.0)] * MESSAGES


class Harness:
    """A decode engine's scheduler that wants many leases of one prefill engine."""

    def __init__(self, many):
        self.link, counters = Nowhere(), Counters()
        self.peers = PeerTable(self.link, FINGERPRINT, counters, retry_after=1.0)
        self.lease_renewer = LeaseRenewer(self.link, self.peers, counters, heartbeat_interval=5.0)
        for number in range(many):
            offer = PullParams(P, name(number), "h", 5600, ((BlockId(1),),), 4)
            self.lease_renewer.start_renewing(name(number), offer, now=0.0)
        self.lease_renewer.on(
            PeerConnected(ConnId(1), Welcome(PROTOCOL, P, FINGERPRINT, ())), now=0.0
        )


def all_aborts_of_8000_requests(many):
    harness = Harness(ABORTS)

    def abort():
        for number in range(ABORTS):
            harness.lease_renewer.release(name(number), P)
        harness.lease_renewer.advance(now=1.0)

    return [abort]


def cost(case, many):
    """Return the milliseconds of one call."""
    return statistics.median(run(case(many)) for _ in range(RUNS))


def run(calls):
    """Return the milliseconds of one of these calls; what was built for others is gone before."""
    gc.collect()
    start = time.thread_time()
    for call in calls:
        call()
    return (time.thread_time() - start) / len(calls) * 1e3


CASES = [
    a_done,
    a_renewal_of_one,
    a_lost_connection_with_100_leases,
    a_done_where_parts_are_staged,
    a_registration,
    a_turn_that_waits_for_pushes,
    all_aborts_of_8000_requests,
]


def main():
    """Print one line for each case."""
    print("| ms of | " + " | ".join(f"{size:,} held" for size in SIZES) + " |")
    print("|---|" + "---|" * len(SIZES))
    for case in CASES:
        sizes = SIZES if case is not all_aborts_of_8000_requests else (ABORTS,)
        figures = [f"{cost(case, size):.4f}" for size in sizes]
        print(f"| {case.__name__.replace('_', ' ')} | " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main()
