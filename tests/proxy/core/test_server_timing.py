"""What a client reads of its request's engines."""

from pdrelay_proxy.core.model import InstanceId, LegOrder, RequestId, Role, SingleEngineReason
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.request_record import LegRecord, RequestRecord
from pdrelay_proxy.core.server_timing import server_timing

P, D = InstanceId("prefill-0"), InstanceId("decode-1")


def test_both_legs_and_how_long_they_took():
    """In milliseconds, as browsers and tracers read the standard header."""
    record = RequestRecord(RequestId("r"), prefill=LegRecord(P, 41.23), decode=LegRecord(D, 12.3))

    assert server_timing(record) == 'prefill;desc="prefill-0";dur=41.2, decode;desc="decode-1";dur=12.3'


def test_a_request_that_was_not_split_says_why():
    """So that nobody wonders where the prefill went."""
    record = RequestRecord(RequestId("r"), single_reason=SingleEngineReason.N, decode=LegRecord(D, 1.0))

    assert server_timing(record) == 'mode;desc="single", reason;desc="n", decode;desc="decode-1";dur=1.0'


def test_what_did_not_happen_is_not_mentioned():
    """A refused body has been nowhere; a leg under way has no duration yet."""
    assert server_timing(RequestRecord(RequestId("r"))) == ""
    assert server_timing(RequestRecord(RequestId("r"), prefill=LegRecord(P))) == 'prefill;desc="prefill-0"'


def test_what_failed_before_is_told_first():
    """With its own time: a slow answer has its reason there."""
    record = RequestRecord(RequestId("r"), push=LegOrder.CONCURRENT, prefill=LegRecord(P, 3.0), decode=LegRecord(D))
    record.set_aside(Role.PREFILL, Failure.BAD_RESPONSE)
    record.start_over()
    record.push, record.prefill = LegOrder.SEQUENTIAL, LegRecord(InstanceId("prefill-1"), 5.0)

    assert server_timing(record) == (
        'retry;desc="prefill-0 bad_response";dur=3.0, mode;desc="push_cold", prefill;desc="prefill-1";dur=5.0'
    )
