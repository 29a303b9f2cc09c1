"""What the Server-Timing header says."""

from xpyd_proxy.core.journey import Journey, Visit
from xpyd_proxy.core.model import InstanceId, RequestId, Solo

P, D = InstanceId("prefill-0"), InstanceId("decode-1")


def test_both_legs_and_how_long_they_took():
    """In milliseconds, as browsers and tracers read the standard header."""
    journey = Journey(RequestId("r"), prefill=Visit(P, 41.23), decode=Visit(D, 12.3))

    assert journey.server_timing() == 'prefill;desc="prefill-0";dur=41.2, decode;desc="decode-1";dur=12.3'


def test_a_request_that_was_not_split_says_why():
    """So that nobody wonders where the prefill went."""
    journey = Journey(RequestId("r"), solo=Solo.N, decode=Visit(D, 1.0))

    assert journey.server_timing() == 'route;desc="solo: n>1", decode;desc="decode-1";dur=1.0'


def test_what_did_not_happen_is_not_mentioned():
    """A refused body has been nowhere; a leg under way has no duration yet."""
    assert Journey(RequestId("r")).server_timing() == ""
    assert Journey(RequestId("r"), prefill=Visit(P)).server_timing() == 'prefill;desc="prefill-0"'
