"""What counts as one client."""

import pytest

from pdrelay_proxy.api.clients import Bounds, Clients, network_of
from support.simulated_loop import advance, in_simulated_time, simulated


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


class Sending:
    """A client that has a second to send something."""

    gave_up_at = None

    def due(self, *, elapsed):
        return 1.0

    def on_overdue(self):
        self.gave_up_at = self.gave_up_at or simulated().time()


@pytest.mark.parametrize(("stopped_s", "gave_up_at"), [(0, 1.0), (5, 5.5)])
def test_a_client_is_heard_after_the_router_has_stood_still(stopped_s, gave_up_at):
    """What it has sent meanwhile is read before it is given up."""

    async def main():
        loop = simulated()
        one = Sending()
        Clients(Bounds(head_s=1.0)).watch(one)
        loop.call_at(0.2, loop.stand_still, stopped_s)
        await advance(20)
        return one.gave_up_at

    assert in_simulated_time(main())[1] == pytest.approx(gave_up_at, abs=0.25)
