"""What a message costs must not depend on how many leases, pushes or requests there are.

Counted in lines of Python that run, not in seconds: the machine that tests may be busy.
"""

import pytest

from benchmarks.connector.leases import ABORTS, CASES, Harness, all_aborts_of_8000_requests, lender_of, name
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import BlockId, ConnId, EngineId, PartId
from pdrelay_connector.core.messages import CopyEnded, WorkerHello
from pdrelay_connector.core.ports import MessageReceived
from pdrelay_connector.core.session.worker_links import WorkerLinks
from pdrelay_connector.core.staging.decode_scheduler import StagingReceiver
from pdrelay_connector.core.staging.slots import Slots
from support.line_count import lines
from support.recording_link import RecordingLink

FEW, MANY = 300, 3000
WORKER = ConnId(1)


def a_turn_in_which_no_lease_ends(many):
    lease_manager = lender_of(many)
    return [lambda: lease_manager.advance(now=10.0)]


def the_end_of_the_latest_copy_into_the_cache(many):
    workers = WorkerLinks(RecordingLink(), {0: b"token"})
    workers.add(WORKER, WorkerHello(0, b"token", receives_pushes=True))
    receiver = StagingReceiver(RecordingLink(), Counters(), workers, Slots([1]))
    for number in range(many):
        receiver.copy_in(name(number), ((BlockId(1),),), ((BlockId(1),),))
    return [lambda: receiver.on(MessageReceived(WORKER, CopyEnded(PartId(many), "")))]


@pytest.mark.parametrize(
    "case",
    [
        *(c for c in CASES if c is not all_aborts_of_8000_requests),
        a_turn_in_which_no_lease_ends,
        the_end_of_the_latest_copy_into_the_cache,
    ],
)
def test_ten_times_as_many_cost_no_more(case):
    """Each of these walked all of them: 1.7 ms with 20,000 leases, on a thread that shares the engine's lock."""
    few, many = (lines(case(size)[0]) for size in (FEW, MANY))

    assert many <= 2 * few


def test_a_surge_of_aborts_costs_as_much_for_each_as_a_single_one():
    """8,000 took 1.7 s."""
    costs = []
    for size in (FEW, MANY):
        harness = Harness(size)
        costs.append(
            lines(lambda harness=harness, size=size: [harness.lease_renewer.release(name(n), P) for n in range(size)])
        )

    assert costs[1] <= 1.2 * MANY / FEW * costs[0]
    assert ABORTS > MANY


P = EngineId("p0")
