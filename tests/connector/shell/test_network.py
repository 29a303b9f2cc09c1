"""What an engine refuses to start with, and what NIXL finds in the environment."""

import os
import socket
import warnings

import psutil
import pytest

with warnings.catch_warnings():  # vLLM's own
    warnings.simplefilter("ignore")
    from pdrelay_connector.shell.network import bind_data_plane, check_side_channel, reach_remarks

from pdrelay_connector.core.ids import Address
from pdrelay_connector.errors import SettingsError
from pdrelay_connector.settings import Settings

pytestmark = pytest.mark.edges


SECRET = b"a secret of these tests"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """As the operator of a new machine has it."""
    monkeypatch.setenv("UCX_NET_DEVICES", "")  # so that it is put back
    monkeypatch.delenv("UCX_NET_DEVICES")
    return monkeypatch


def other_address():
    """Return an interface of this machine that others reach, and its address."""
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return name, each.address
    pytest.skip("this machine has loopback addresses only")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_on_loopback_no_secret_is_needed(host):
    """What one tries out on a laptop."""
    check_side_channel(Settings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "other"])
def test_where_others_can_come_a_secret_is_needed(host):
    """Any client of an open side channel learns the addresses of all KV, and may read and write it."""
    host = other_address()[1] if host == "other" else host

    with pytest.raises(SettingsError, match="there is no secret; set PDRELAY_CONNECTOR_SECRET"):
        check_side_channel(Settings(host=host))


@pytest.mark.parametrize(
    "given",
    [{"secrets": (SECRET,)}, {"secret_file": "/run/secret"}, {"tls_ca": "ca.pem"}, {"allow_open_side_channel": True}],
    ids=lambda given: next(iter(given)),
)
def test_a_secret_an_authority_or_the_operators_word_lets_it_start(given):
    """Each of them is a decision."""
    check_side_channel(Settings(host="0.0.0.0", **given))


def test_nixl_gets_the_interface_of_the_side_channel(environment):
    """And no other."""
    bind_data_plane(Settings(), Address("localhost", 5600))
    assert os.environ["UCX_NET_DEVICES"] == "lo"
    name, address = other_address()
    environment.delenv("UCX_NET_DEVICES")
    bind_data_plane(Settings(host=address), Address(address, 5600))

    assert name in os.environ["UCX_NET_DEVICES"].split(",")
    assert "lo" not in os.environ["UCX_NET_DEVICES"].split(",")


@pytest.mark.parametrize("is_bound", [True, False], ids=["worker here", "worker elsewhere"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_an_engine_that_reaches_this_machine_only_says_so(host, is_bound):
    """A decode engine in pull does not listen, so a missing host would show at the first request only."""
    if is_bound:
        bind_data_plane(Settings(host=host), Address(host, 5600))
    (sentence,) = reach_remarks(Settings(host=host))

    assert "engines of this machine only" in sentence
    assert f"VLLM_NIXL_SIDE_CHANNEL_HOST is {host!r}" in sentence


def test_ucx_on_loopback_reaches_this_machine_only_whatever_the_side_channel_does(environment):
    """The operator's own choice."""
    environment.setenv("UCX_NET_DEVICES", "lo")
    (sentence,) = reach_remarks(Settings(host=other_address()[1]))

    assert "UCX_NET_DEVICES is 'lo'" in sentence


@pytest.mark.parametrize("given", [{}, {"allow_open_data_plane": True, "host": "localhost"}], ids=["host", "open"])
def test_an_engine_that_may_reach_others_says_nothing(given):
    """That shows at the first handshake."""
    assert reach_remarks(Settings(**{"host": other_address()[1], **given})) == []


def test_what_the_operator_has_set_for_ucx_stays(environment):
    """The operator knows the fabric; but not everything."""
    environment.setenv("UCX_NET_DEVICES", "eth7")
    bind_data_plane(Settings(), Address("localhost", 5600))
    assert os.environ["UCX_NET_DEVICES"] == "eth7"
    environment.setenv("UCX_NET_DEVICES", "all")
    with pytest.raises(SettingsError, match="UCX_NET_DEVICES is 'all'"):
        bind_data_plane(Settings(), Address("localhost", 5600))
