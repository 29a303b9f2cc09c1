"""What makes a worker a router among others."""

import socket
from dataclasses import dataclass, replace

import pytest

from pdrelay_proxy.consistency import check, check_admin_port
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.worker_place import WorkerPlace, check_workers, limits_of_each
from pdrelay_proxy.settings import Settings

SEVERAL = Settings(workers=3, port=8000, admin_port=9000, decode=("d:1",))


@dataclass(frozen=True)
class Common:
    """Settings of a feature."""

    text: str = ""


def check_several(settings):
    """Check what is said of several workers, whether or not there is a feature by which they meet."""
    check_workers(settings)
    check_admin_port(settings)


@pytest.fixture
def place():
    """The place of worker 1 of three; its sockets lead nowhere."""
    with socket.socket() as nowhere:
        yield WorkerPlace(1, 8000, (Common("all"),), nowhere, (701, 703), "s" * 32, SEVERAL, nowhere)


def test_a_worker_is_a_router_with_an_admin_port_of_its_own_and_some_settings_of_all(place):
    """So that they share what routers share, and nothing else is needed."""
    own = place.settings(SEVERAL)

    assert (own.workers, own.port, own.admin_port) == (1, 8000, 9001)
    assert own.for_feature(Common) == Common("all")
    check(own)


def test_the_limits_that_hold_for_each_worker_are_named():
    """An operator who is not told would believe that they hold for all together."""
    said = limits_of_each(replace(SEVERAL, max_concurrency=7, max_queue=9, max_rate=5.0))

    assert said.startswith("max_concurrency 7, max_queue 9, max_inflight_bytes ")
    assert "max_rate" not in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"admin_port": None}, "workers is 3, and admin_port is not set: each worker has its own metrics"),
        ({"admin_port": 65_534}, "the last of 3 workers would have 65536: write at most 65533"),
        ({"admin_port": 7998}, "port is 8000, and the admin ports of 3 workers are 7998 to 8000"),
    ],
)
def test_settings_that_contradict_several_workers_are_refused(changes, said):
    """Numbers of one worker of several would pass for those of all."""
    with pytest.raises(ConfigError, match=said):
        check_several(replace(SEVERAL, **changes))
    check_several(SEVERAL)
    check_several(replace(SEVERAL, admin_port=0))
    check_several(replace(SEVERAL, admin_port=7998, host="127.0.0.2", admin_host="127.0.0.1"))
