"""Steps in flight: each ends once for its owner, and an owner is active until the last one has ended."""

import pytest

from support.recording_agent import RecordingAgent, RecordingCopier
from xpyd_connector.core.counters import Counters
from xpyd_connector.core.ids import CopyId
from xpyd_connector.core.ports import XferOutcome
from xpyd_connector.core.transfer.transfers import StepEnded, Transfers
from xpyd_connector.errors import TransferError


class Harness:
    def __init__(self):
        self.agent, self.copier, self.counters = (
            RecordingAgent({"broken": "no route"}.get),
            RecordingCopier(),
            Counters(),
        )
        self.transfers = Transfers(self.agent, self.copier, self.counters)

    def end(self, number, outcome=XferOutcome.DONE, reason=""):
        self.agent.end(number, outcome=outcome, reason=reason)
        return list(self.transfers.poll())


@pytest.fixture
def harness():
    return Harness()


@pytest.mark.parametrize("post", ["read", "write"])
def test_an_owner_is_active_until_its_last_transfer_has_ended(harness, post):
    """Its memory must not be given to another before."""
    getattr(harness.transfers, post)("a", [("p/0", None), ("p/1", None)])

    assert harness.end(1) == [StepEnded("a", "")]
    assert harness.transfers.is_active("a")
    assert harness.end(0) == [StepEnded("a", "")]
    assert not harness.transfers.is_active("a")
    assert len(harness.transfers) == 0
    assert [sample.bytes for sample in harness.counters.take().transfers] == [64, 64]


def test_a_cancelled_transfer_ends_when_nixl_says_so(harness):
    """Until then its bytes may arrive."""
    harness.transfers.read("a", [("p/0", None)])
    harness.transfers.read("b", [("p/0", None)])
    harness.transfers.cancel("a")
    harness.transfers.cancel("unknown")

    assert harness.agent.cancelled == [0]
    assert harness.transfers.is_active("a")
    assert harness.end(0, XferOutcome.FAILED, "cancelled") == [StepEnded("a", "NIXL: cancelled")]
    assert not harness.transfers.is_active("a")
    assert harness.transfers.is_active("b")
    assert harness.counters.take().transfers == []


def test_what_was_started_before_a_failure_stays_in_flight(harness):
    """The caller must cancel it, and wait for its end."""
    with pytest.raises(TransferError, match="no route"):
        harness.transfers.write("a", [("p/0", None), ("broken", None)])

    assert harness.transfers.is_active("a")
    harness.end(0)
    assert not harness.transfers.is_active("a")


@pytest.mark.parametrize("reason", ["", "out of memory"])
def test_a_copy_is_a_step_like_any_other(harness, reason):
    """It ends after NIXL's transfers of the same poll."""
    harness.transfers.read("a", [("p/0", None)])
    harness.transfers.add_copy("a", CopyId(1))
    harness.copier.end(1, reason=reason)

    assert harness.end(0) == [
        StepEnded("a", ""),
        StepEnded("a", reason, is_copy=True, copied_bytes=0 if reason else 64),
    ]
    assert not harness.transfers.is_active("a")
