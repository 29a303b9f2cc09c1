"""What has a life in the core has it as a table: what is not in the table is a bug and says so."""

import pytest

from pdrelay_connector.core.ids import Address, ConnId, EngineId, RequestId
from pdrelay_connector.core.lease import lease_table
from pdrelay_connector.core.messages import RegisterPush, StagePart
from pdrelay_connector.core.pull import load
from pdrelay_connector.core.push import expected_push, part_writer, push_job, registered_push
from pdrelay_connector.core.session import peers
from pdrelay_connector.core.staging import staged_read
from pdrelay_connector.errors import IllegalTransition
from support.engines import lent

D = ConnId(7)
P = EngineId("p0")
ADDRESS = Address("10.0.0.1", 5600)
T = RequestId("t")
A = RequestId("d-a")
REGISTER = RegisterPush(A, T, None, lent(0, (1,)))
STAGE = StagePart(T, A, 0, 1, 0, ((),))
LIVES = {  # module: (one that is in a state, what its errors call it)
    lease_table: (lambda state: lease_table._Lease(0.0, state), "a lease"),
    load: (lambda state: load.Load(load.LoadOrder(A, T, P, ADDRESS, ()), state), "load of d-a"),
    peers: (lambda state: peers.Peer(P, ADDRESS, D, state), "peer p0"),
    registered_push: (lambda state: registered_push.RegisteredPush(D, REGISTER, set(), state), "the push to d-a"),
    push_job: (lambda state: push_job.PushJob(D, REGISTER, state), "the push to d-a"),
    expected_push: (
        lambda state: expected_push.ExpectedPush(expected_push.PushOrder(A, T, P, ADDRESS, None, ()), state),
        "landing of d-a",
    ),
    part_writer: (lambda state: part_writer._PartWrite(7, (), (), state), "write of part 7"),
    staged_read: (lambda state: staged_read.StagedPart(1, STAGE, state), "part 0 of t"),
}


def cells():
    for module in LIVES:
        events = {type(event) for row in module.TRANSITIONS.values() for event in row}.pop()
        for before in type(next(iter(module.TRANSITIONS))):
            yield from (pytest.param(module, before, event, id=f"{before}-{event}") for event in events)


@pytest.mark.parametrize(("module", "before", "event"), list(cells()))
def test_every_cell_of_a_table(module, before, event):
    make, name = LIVES[module]
    one = make(before)
    row = module.TRANSITIONS[before]
    if event in row:
        one.on(event)
        assert one.state is row[event]
    else:
        with pytest.raises(IllegalTransition, match=f"{name} cannot handle {event.name} while {before.name}"):
            one.on(event)
