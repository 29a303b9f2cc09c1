"""Which engines are at the host that calls: it may change no others."""

import pytest

from pdrelay_proxy.core.http.own_address import is_own_address


@pytest.mark.parametrize(
    ("caller", "places", "is_own"),
    [
        ("10.0.0.7", ("10.0.0.7",), True),
        ("10.0.0.7", ("10.0.0.8",), False),
        ("::ffff:10.0.0.7", ("10.0.0.7",), True),
        ("10.0.0.7", ("::ffff:10.0.0.7",), True),
        ("fd00::7", ("fd00:0::7",), True),
        ("fe80::7%1", ("fe80::7%2",), False),
        ("127.0.0.1", ("127.0.0.4", "::1"), True),
        ("::ffff:127.0.0.1", ("::1",), True),
        ("127.0.0.1", ("10.0.0.7",), False),
        ("10.0.0.7", ("127.0.0.1",), False),
        ("10.0.0.7", ("10.0.0.7", "10.0.0.8"), False),
        ("10.0.0.7", (), False),
        ("", ("10.0.0.7",), False),
        ("a-socket", ("a-socket",), False),
        ("0.0.0.0", ("127.0.0.1",), False),
    ],
)
def test_only_the_same_host_is_ones_own(caller, places, is_own):
    """All addresses of an engine have to be the caller's; loopback is one host, and what is no address is none."""
    assert is_own_address(caller, places) is is_own
