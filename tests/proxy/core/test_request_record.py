"""What the record of a request says."""

import pytest

from pdrelay_proxy.core.model import InstanceId, RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.request_record import CLIENT_CLOSED_REQUEST, LegRecord, RequestRecord

P, D = InstanceId("prefill-0"), InstanceId("decode-1")


def test_every_try_has_an_id_of_its_own_that_begins_like_the_clients():
    """Engines match the halves of a request by it, and somebody must find them in their logs."""
    record = RequestRecord(RequestId("r"), decode=LegRecord(D))
    ids = []
    for _ in range(3):
        ids.append(record.attempt_id)
        record.decode = LegRecord(D)
        record.set_aside(Role.DECODE, Failure.BAD_RESPONSE)

    assert ids == ["r", "r-r1", "r-r2"]


@pytest.mark.parametrize(
    ("status", "error", "outcome"),
    [
        (200, None, "ok"),
        (200, "it broke off", "stream_aborted"),
        (404, "no such model", "client_error"),
        (CLIENT_CLOSED_REQUEST, None, "client_disconnected"),
        (503, None, "server_error"),
    ],
)
def test_requests_are_told_apart_by_how_they_ended_for_the_client(status, error, outcome):
    """A stream that broke off has status 200 and is no success."""
    record = RequestRecord(RequestId("r"), error=error)
    record.over(status, 1.0)

    assert record.outcome == outcome
