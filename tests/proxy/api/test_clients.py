"""What counts as one client."""

import pytest

from xpyd_proxy.api.clients import network_of


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_address_counts_with_those_that_one_customer_has(host, network):
    """RFC 6177: a site gets 64 bits at least."""
    assert network_of(host) == network


def test_what_is_no_address_is_a_fault_of_ours():
    """The kernel names clients by nothing else: a name that is one for all would share one limit."""
    with pytest.raises(ValueError, match="nowhere"):
        network_of("nowhere")
