"""Where NIXL may listen: whoever reaches it over TCP reads and writes this process's memory."""

import pytest

from pdrelay_connector.core.session.data_plane import NetworkInterfaces, choose_devices
from pdrelay_connector.errors import SettingsError

INTERFACES = {
    "lo": frozenset({"127.0.0.1", "::1"}),
    "eth0": frozenset({"10.0.0.1", "fd00::1"}),
    "eth1": frozenset({"192.0.2.1"}),
}
RDMA = ("mlx5_0:1", "mlx5_1:1")


def choose(host, address, *, chosen=None, backends=("UCX",), rdma=(), allow_open=False):
    return choose_devices(
        host, lambda: NetworkInterfaces(address, INTERFACES, rdma), chosen, backends, allow_open=allow_open
    )


@pytest.mark.parametrize(
    ("host", "address", "devices"),
    [
        ("localhost", "127.0.0.1", "lo"),
        ("::1", "::1", "lo"),
        ("10.0.0.1", "10.0.0.1", "eth0"),
        ("engine.example", "fd00::1", "eth0"),
        ("192.0.2.1", "192.0.2.1", "eth1"),
    ],
)
def test_nixl_gets_the_interface_of_the_side_channel(host, address, devices):
    """And no other, whatever else the machine is connected to."""
    assert choose(host, address) == devices


def test_rdma_devices_stay_in_use():
    """Their network cards check keys; without them every engine would fall back to TCP in silence."""
    assert choose("10.0.0.1", "10.0.0.1", rdma=RDMA) == "eth0,mlx5_0:1,mlx5_1:1"


def test_on_loopback_no_network_card_is_used():
    """What one machine tries out is no business of its network."""
    assert choose("localhost", "127.0.0.1", rdma=RDMA) == "lo"


@pytest.mark.parametrize("chosen", ["eth1", "mlx5_0:1", "eth0,mlx5_0:1"])
def test_devices_that_the_operator_names_stay(chosen):
    """The operator knows the fabric."""
    assert choose("10.0.0.1", "10.0.0.1", chosen=chosen) is None


@pytest.mark.parametrize("chosen", ["all", "eth0, all", "^eth1", "eth*", "", "mlx5_?:1"])
def test_a_list_that_means_all_is_refused(chosen):
    """With the variable, its value and what would be right."""
    with pytest.raises(SettingsError, match=r"UCX_NET_DEVICES is .*name the devices, or set allow_open_data_plane"):
        choose("10.0.0.1", "10.0.0.1", chosen=chosen)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_side_channel_on_all_interfaces_is_refused(host):
    """No interface follows from it."""
    with pytest.raises(SettingsError, match=r"set it to one address of this machine, or allow_open_data_plane"):
        choose(host, "10.0.0.1")


def test_an_address_of_another_machine_is_refused():
    """Decode engines would dial it in vain."""
    with pytest.raises(SettingsError, match=r"no interface of this machine has the address '10\.0\.0\.9'"):
        choose("10.0.0.9", "10.0.0.9")


@pytest.mark.parametrize("backends", [("LIBFABRIC",), ("UCX", "LIBFABRIC")])
def test_backends_that_we_cannot_bind_need_the_operators_word(backends):
    """We do not know where they listen."""
    with pytest.raises(SettingsError, match="NIXL's backend LIBFABRIC chooses by itself"):
        choose("10.0.0.1", "10.0.0.1", backends=backends)


@pytest.mark.parametrize("options", [{"chosen": "all"}, {"backends": ("LIBFABRIC",)}, {}])
@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1"])
def test_an_open_data_plane_can_be_allowed(host, options):
    """Then nothing is set: UCX chooses as it always has."""
    assert choose(host, "10.0.0.1", allow_open=True, **options) is None
