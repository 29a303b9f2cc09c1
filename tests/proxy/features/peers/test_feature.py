"""Where a router meets the others."""

import socket
import time

import pytest

from pdrelay_proxy.app import build
from pdrelay_proxy.features import has_other_routers
from pdrelay_proxy.features.feature import Ground
from pdrelay_proxy.features.peers.feature import PeersFeature
from pdrelay_proxy.features.peers.settings import PeerSettings
from pdrelay_proxy.io.worker_place import WorkerPlace
from pdrelay_proxy.known_settings import SECRETS
from pdrelay_proxy.settings import Settings

SEVERAL = Settings(workers=3, port=8000, admin_port=9000, decode=("d:1",))
PEERS = PeerSettings(("router-2:8001", "10.0.0.3:9001"), 8002, "s" * 32)


@pytest.fixture
def place():
    """The place of worker 1 of three; its sockets lead nowhere."""
    with socket.socket() as nowhere:
        yield WorkerPlace(1, 8000, (), nowhere, (701, 703), "s" * 32, SEVERAL, nowhere)


def meeting(settings, place=None):
    return PeersFeature(Ground(settings, None, time.monotonic, place))._meeting()


def test_a_worker_meets_the_others_on_loopback(place):
    """At ports and with a secret that the supervisor has drawn."""
    found = meeting(place.settings(SEVERAL), place)

    assert [other.authority for other in found.routers] == ["127.0.0.1:701", "127.0.0.1:703"]
    assert (found.secret, found.listen) == (b"s" * 32, place.peer_socket)


def test_a_router_meets_those_of_its_settings():
    """It listens at its own host."""
    found = meeting(Settings(host="::").with_features(PEERS))

    assert [other.authority for other in found.routers] == ["router-2:8001", "10.0.0.3:9001"]
    assert (found.secret, found.listen) == (b"s" * 32, ("::", 8002))


def test_a_router_alone_meets_none():
    """And opens no port."""
    assert meeting(Settings()) is None


@pytest.mark.parametrize(
    ("settings", "has_others"), [(Settings(), False), (Settings().with_features(PEERS), True), (SEVERAL, True)]
)
def test_peers_and_workers_are_other_routers(settings, has_others):
    """Loads and limits are those of all."""
    assert has_other_routers(settings) is has_others


def test_the_secret_is_no_option_and_is_not_shown():
    """It would stand in ps."""
    assert "peer_secret" in SECRETS
    assert "ssss" not in repr(PEERS)


@pytest.mark.parametrize("is_worker", [False, True])
def test_limits_of_a_worker_are_shared(place, is_worker):
    """Its own settings name no others."""
    settings = Settings(decode=("d:1",), max_rate=5.0)
    router = build(settings, place=place if is_worker else None)

    assert router.requests.services.gate.admission.shares_limits is is_worker
