"""Where workers listen."""

import socket

import pytest

from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io import listening
from pdrelay_proxy.io.listening import bound, reserved
from pdrelay_proxy.listeners import main_sockets
from pdrelay_proxy.settings import Settings

pytestmark = [pytest.mark.edges, pytest.mark.skipif("not hasattr(__import__('socket'), 'SO_REUSEPORT')")]


def test_workers_share_the_port_that_is_kept_for_them():
    """And connections go to those that listen, not to who only keeps it."""
    with reserved("127.0.0.1", 0) as port:
        (one,), (other,) = bound("127.0.0.1", port), bound("127.0.0.1", port)
        with one, other:
            for each in (one, other):
                each.listen()
                each.setblocking(False)
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
            met = [_accepted(each) for each in (one, other)]
            for client in clients:
                client.close()

    assert sum(met) == 64
    assert min(met) > 0


def _accepted(listener):
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_a_port_that_another_router_shares_is_refused():
    """The kernel would let two routers of one user have the same port, each with half of the requests."""
    with reserved("127.0.0.1", 0) as port:
        (worker,) = bound("127.0.0.1", port)
        with worker:
            worker.listen()
            with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}: Address already in use"):
                reserved("127.0.0.1", port).__enter__()


def test_all_addresses_of_a_name_have_one_port():
    """localhost may be two of them."""
    with reserved("localhost", 0) as port:
        sockets = bound("localhost", port)
        assert {one.getsockname()[1] for one in sockets} == {port}
        for one in sockets:
            one.close()


def _has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("is_shared", [True, False])
def test_the_wildcard_of_ipv6_takes_clients_of_both_families(is_shared):
    """A pod of a cluster with both has an address of each: its probes come to the one, its Service may be the other."""
    settings = Settings(host="::", port=0)
    (one,) = main_sockets(settings, is_shared=is_shared)
    with one:
        one.listen()
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, one.getsockname()[1]), timeout=5).close()


def test_where_the_kernel_does_not_spread_connections_workers_are_refused(monkeypatch):
    """All would go to one of them, or none could listen."""
    monkeypatch.setattr(listening, "_CAN_SHARE_PORTS", False)

    with pytest.raises(ConfigError, match="workers above 1 need Linux"):
        reserved("127.0.0.1", 0).__enter__()
