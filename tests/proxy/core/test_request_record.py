"""What the Server-Timing header says."""

from xpyd_proxy.core.model import InstanceId, Push, RequestId, Role, Solo
from xpyd_proxy.core.request_record import LegRecord, RequestRecord

P, D = InstanceId("prefill-0"), InstanceId("decode-1")


def test_both_legs_and_how_long_they_took():
    """In milliseconds, as browsers and tracers read the standard header."""
    record = RequestRecord(RequestId("r"), prefill=LegRecord(P, 41.23), decode=LegRecord(D, 12.3))

    assert record.server_timing() == 'prefill;desc="prefill-0";dur=41.2, decode;desc="decode-1";dur=12.3'


def test_a_request_that_was_not_split_says_why():
    """So that nobody wonders where the prefill went."""
    record = RequestRecord(RequestId("r"), solo=Solo.N, decode=LegRecord(D, 1.0))

    assert record.server_timing() == 'route;desc="solo: n>1", decode;desc="decode-1";dur=1.0'


def test_what_did_not_happen_is_not_mentioned():
    """A refused body has been nowhere; a leg under way has no duration yet."""
    assert RequestRecord(RequestId("r")).server_timing() == ""
    assert RequestRecord(RequestId("r"), prefill=LegRecord(P)).server_timing() == 'prefill;desc="prefill-0"'


def test_what_failed_before_is_told_first():
    """With its own time: a slow answer has its reason there."""
    record = RequestRecord(RequestId("r"), push=Push.AT_ONCE, prefill=LegRecord(P, 3.0), decode=LegRecord(D))
    record.set_aside(Role.PREFILL, "failed")
    record.start_over()
    record.push, record.prefill = Push.IN_TURN, LegRecord(InstanceId("prefill-1"), 5.0)

    assert record.server_timing() == (
        'retry;desc="prefill-0 failed";dur=3.0, route;desc="push, prefill first", prefill;desc="prefill-1";dur=5.0'
    )


def test_every_try_has_an_id_of_its_own_that_begins_like_the_clients():
    """Engines match the halves of a request by it, and somebody must find them in their logs."""
    record, ids = RequestRecord(RequestId("r"), decode=LegRecord(D)), []
    for _ in range(3):
        ids.append(record.attempt_id)
        record.decode = LegRecord(D)
        record.set_aside(Role.DECODE, "failed")

    assert ids == ["r", "r-r1", "r-r2"]
