"""What a message costs an engine that holds many leases, and a decode engine whose queue is aborted.

``nice .venv/bin/python tests/benchmarks/connector/leases.py`` prints the table of docs/benchmarks/leases.md: the cores
alone, with a link that goes nowhere. Each figure is CPU time of the thread, and the median of three runs.
"""

import gc
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "connector"), str(ROOT / "tests")]

from support.engines import FINGERPRINT, lent, rank_info  # noqa: E402 (found only now)
from xpyd_connector.core.counters import Tally  # noqa: E402
from xpyd_connector.core.ids import Address, BlockId, ConnId, EngineId, RequestId  # noqa: E402
from xpyd_connector.core.lease.decode_scheduler import Borrower  # noqa: E402
from xpyd_connector.core.lease.kv_params import Offer  # noqa: E402
from xpyd_connector.core.lease.lease_table import LeaseBook  # noqa: E402
from xpyd_connector.core.lease.prefill_scheduler import Lender  # noqa: E402
from xpyd_connector.core.messages import PROTOCOL, Done, Memory, Register, Renew, Stage, Welcome  # noqa: E402
from xpyd_connector.core.ports import Lost, Met, Received  # noqa: E402
from xpyd_connector.core.push.decode_scheduler import Landings, Ticket  # noqa: E402
from xpyd_connector.core.push.prefill_scheduler import Pushes  # noqa: E402
from xpyd_connector.core.session.peers import PeerBook  # noqa: E402
from xpyd_connector.core.session.worker_links import Crew  # noqa: E402
from xpyd_connector.core.staging.prefill_scheduler import Stagings  # noqa: E402
from xpyd_connector.core.staging.slots import Slots  # noqa: E402

SIZES, RUNS, MESSAGES, ABORTS = (1000, 5000, 20000), 3, 100, 8000
D, ELSE, P = ConnId(1), ConnId(2), EngineId("p0")


class Nowhere:
    """A link that sends nothing."""

    def __init__(self):
        self.met = 0

    def meet(self, peer, engine):
        self.met += 1
        return ConnId(self.met)

    def send(self, conn, message):
        pass

    def close(self, conn):
        pass


def name(number):
    return RequestId(f"cmpl-{number:08d}")


def renewed(lender, many):
    """Grant so many leases and have one connection claim them; the last hundred are another's."""
    for number in range(many):
        lender.grant(name(number), now=number * 1e-4)
    claimed, rest = [name(n) for n in range(many - 100)], [name(n) for n in range(many - 100, many)]
    lender.renew(D, claimed, now=10.0)
    lender.renew(ELSE, rest, now=10.0)
    lender.take_released()


def lender_of(many):
    lender = Lender(Nowhere(), LeaseBook(duration=30.0, extension=20.0), Tally())
    renewed(lender, many)
    return lender


def a_done(many):
    lender = lender_of(many)
    return [lambda n=n: lender.on(Received(D, Done(name(n), name(n), 0, 1)), now=10.0) for n in range(MESSAGES)]


def a_renewal_of_one(many):
    lender = lender_of(many)
    return [lambda n=n: lender.on(Received(D, Renew((name(n),))), now=11.0) for n in range(MESSAGES)]


def a_lost_connection_with_100_leases(many):
    lender = lender_of(many)
    return [lambda: lender.on(Lost(ELSE, "gone"), now=10.0)]


def a_done_where_parts_are_staged(many):
    link, tally = Nowhere(), Tally()
    lender = lender_of(many)
    stagings = Stagings(link, lender, tally, Crew(link, {0: b""}), Slots([16]), blocks=1 << 20, patience=60.0)
    for number in range(many - 100):
        order = Stage(name(number), name(number), 0, 2, 0, ((BlockId(1),),))
        stagings.on(Received(D, order), now=10.0)

    def done(number):
        stagings.on(Received(D, Done(name(number), name(number), 0, 1)), now=10.0)
        stagings.advance(now=10.0)
        stagings.released(lender.take_released())

    return [lambda n=n: done(n) for n in range(MESSAGES)]


def a_registration(many):
    lender = Lender(Nowhere(), LeaseBook(duration=30.0, extension=20.0), Tally())
    pushes = Pushes(Nowhere(), lender, Tally(), tokens={0: b""}, patience=480.0)
    pushes.on(Received(D, Memory(rank_info("d", blocks=1 << 20))), now=0.0)
    for guest in range(100):  # as many decode engines
        pushes.on(Received(ConnId(10 + guest), Memory(rank_info("d", blocks=1 << 20))), now=0.0)

    def register(number):
        pushes.on(Received(D, Register(name(number), name(number), None, lent(0, [1]))), now=0.0)

    for number in range(many):
        register(number)
    return [lambda n=n: register(many + n) for n in range(MESSAGES)]


def a_turn_that_waits_for_pushes(many):
    desk = Desk(many)
    landings = Landings(
        desk.link, desk.peers, desk.borrower, Tally(), [rank_info("d")], timeout=480.0, patience=30.0
    )  # fmt: skip
    for number in range(many):
        landings.expect(Ticket(name(number), name(number), P, Address("h", 1), None, lent(0, [1])), now=0.0)
    landings.advance(now=1.0)
    return [lambda: landings.advance(now=1.0)] * MESSAGES


class Desk:
    """A decode engine's scheduler that wants many leases of one prefill engine."""

    def __init__(self, many):
        self.link, tally = Nowhere(), Tally()
        self.peers = PeerBook(self.link, FINGERPRINT, tally, retry_after=1.0)
        self.borrower = Borrower(self.link, self.peers, tally, heartbeat_interval=5.0)
        for number in range(many):
            offer = Offer(P, name(number), "h", 5600, ((BlockId(1),),), 4)
            self.borrower.want(name(number), offer, now=0.0)
        self.borrower.on(Met(ConnId(1), Welcome(PROTOCOL, P, FINGERPRINT, ())), now=0.0)


def all_aborts_of_8000_requests(many):
    desk = Desk(ABORTS)

    def abort():
        for number in range(ABORTS):
            desk.borrower.give_back(name(number), P)
        desk.borrower.advance(now=1.0)

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
