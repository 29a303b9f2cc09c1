"""What the record of a request says: in the Server-Timing header, and to the counters."""

import pytest

from pdrelay_proxy.core.model import InstanceId, LegOrder, RequestId, Role, SingleEngineReason
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.request_record import CLIENT_CLOSED_REQUEST, LegRecord, RequestRecord

P, D = InstanceId("prefill-0"), InstanceId("decode-1")


def test_both_legs_and_how_long_they_took():
    """In milliseconds, as browsers and tracers read the standard header."""
    record = RequestRecord(RequestId("r"), prefill=LegRecord(P, 41.23), decode=LegRecord(D, 12.3))

    assert record.server_timing() == 'prefill;desc="prefill-0";dur=41.2, decode;desc="decode-1";dur=12.3'


def test_a_request_that_was_not_split_says_why():
    """So that nobody wonders where the prefill went."""
    record = RequestRecord(RequestId("r"), single_reason=SingleEngineReason.N, decode=LegRecord(D, 1.0))

    assert record.server_timing() == 'mode;desc="single", reason;desc="n", decode;desc="decode-1";dur=1.0'


def test_what_did_not_happen_is_not_mentioned():
    """A refused body has been nowhere; a leg under way has no duration yet."""
    assert RequestRecord(RequestId("r")).server_timing() == ""
    assert RequestRecord(RequestId("r"), prefill=LegRecord(P)).server_timing() == 'prefill;desc="prefill-0"'


def test_what_failed_before_is_told_first():
    """With its own time: a slow answer has its reason there."""
    record = RequestRecord(RequestId("r"), push=LegOrder.CONCURRENT, prefill=LegRecord(P, 3.0), decode=LegRecord(D))
    record.set_aside(Role.PREFILL, Failure.BAD_RESPONSE)
    record.start_over()
    record.push, record.prefill = LegOrder.SEQUENTIAL, LegRecord(InstanceId("prefill-1"), 5.0)

    assert record.server_timing() == (
        'retry;desc="prefill-0 bad_response";dur=3.0, mode;desc="push_cold", prefill;desc="prefill-1";dur=5.0'
    )


def test_every_try_has_an_id_of_its_own_that_begins_like_the_clients():
    """Engines match the halves of a request by it, and somebody must find them in their logs."""
    record, ids = RequestRecord(RequestId("r"), decode=LegRecord(D)), []
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
