"""Steps in flight: each ends once for its owner, and an owner is active until the last one has ended."""

import pytest

from xpyd_connector.core.counters import Counters
from xpyd_connector.core.ids import CopyId, XferId
from xpyd_connector.core.ports import CopyResult, XferEnded, XferOutcome
from xpyd_connector.core.transfer.transfers import StepEnded, Transfers
from xpyd_connector.errors import TransferError


class Agent:
    """Numbers what it is given; a test ends it."""

    def __init__(self):
        self.posted, self.cancelled, self.ended = [], [], []

    def read(self, handle, spans):
        if handle == "broken":
            raise TransferError("no route")
        self.posted.append(handle)
        return XferId(len(self.posted))

    write = read

    def cancel(self, xfer):
        self.cancelled.append(xfer)

    def poll(self):
        ended, self.ended = self.ended, []
        return ended


class Copier:
    def __init__(self):
        self.ended = []

    def poll(self):
        ended, self.ended = self.ended, []
        return ended


class Desk:
    def __init__(self):
        self.agent, self.copier, self.counters = Agent(), Copier(), Counters()
        self.transfers = Transfers(self.agent, self.copier, self.counters)

    def end(self, number, outcome=XferOutcome.DONE, reason=""):
        self.agent.ended.append(XferEnded(XferId(number), outcome, 64, 1, 0.1, reason, 0.01))
        return list(self.transfers.poll())


@pytest.fixture
def desk():
    return Desk()


@pytest.mark.parametrize("post", ["read", "write"])
def test_an_owner_is_active_until_its_last_transfer_has_ended(desk, post):
    """Its memory must not be given to another before."""
    getattr(desk.transfers, post)("a", [("p/0", None), ("p/1", None)])

    assert desk.end(2) == [StepEnded("a", "")]
    assert desk.transfers.is_active("a")
    assert desk.end(1) == [StepEnded("a", "")]
    assert not desk.transfers.is_active("a")
    assert len(desk.transfers) == 0
    assert [sample.bytes for sample in desk.counters.take().transfers] == [64, 64]


def test_a_cancelled_transfer_ends_when_nixl_says_so(desk):
    """Until then its bytes may arrive."""
    desk.transfers.read("a", [("p/0", None)])
    desk.transfers.read("b", [("p/0", None)])
    desk.transfers.cancel("a")
    desk.transfers.cancel("unknown")

    assert desk.agent.cancelled == [1]
    assert desk.transfers.is_active("a")
    assert desk.end(1, XferOutcome.FAILED, "cancelled") == [StepEnded("a", "NIXL: cancelled")]
    assert not desk.transfers.is_active("a")
    assert desk.transfers.is_active("b")
    assert desk.counters.take().transfers == []


def test_what_was_started_before_a_failure_stays_in_flight(desk):
    """The caller must cancel it, and wait for its end."""
    with pytest.raises(TransferError, match="no route"):
        desk.transfers.write("a", [("p/0", None), ("broken", None)])

    assert desk.transfers.is_active("a")
    desk.end(1)
    assert not desk.transfers.is_active("a")


@pytest.mark.parametrize("reason", ["", "out of memory"])
def test_a_copy_is_a_step_like_any_other(desk, reason):
    """It ends after NIXL's transfers of the same poll."""
    desk.transfers.read("a", [("p/0", None)])
    desk.transfers.add_copy("a", CopyId(1))
    desk.copier.ended.append(CopyResult(CopyId(1), reason, 32, 0.1))

    assert desk.end(1) == [StepEnded("a", ""), StepEnded("a", reason, is_copy=True, copied_bytes=32)]
    assert not desk.transfers.is_active("a")
