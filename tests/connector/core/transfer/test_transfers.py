"""Steps in flight: each ends once for its owner, and an owner is active until the last one has ended."""

import pytest

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.transfer.transfers import StepEnded, Transfers
from support.recording_agent import RecordingAgent, RecordingCopier


@pytest.mark.parametrize("post", ["read", "write"])
def test_an_owner_is_active_until_its_last_transfer_has_ended(post):
    """Its memory must not be given to another before."""
    agent = RecordingAgent()
    counters = Counters()
    transfers = Transfers(agent, RecordingCopier(), counters)
    getattr(transfers, post)("a", [("p/0", None), ("p/1", None)], peer="p")
    agent.end(1)
    assert list(transfers.poll()) == [StepEnded("a", "")]
    assert transfers.is_active("a")
    agent.end(0)
    assert list(transfers.poll()) == [StepEnded("a", "")]

    assert not transfers.is_active("a")
    assert len(transfers) == 0
    assert [(sample.bytes, sample.peer) for sample in counters.take_report().transfers] == [(64, "p"), (64, "p")]
