"""What UCX logs of its protocols, read back; the text is that of UCX 1.23 with NIXL 1.5.1."""

import pytest

from pdrelay_connector.core.doctor.ucx_log import is_over_tcp, transports_in

TABLE = """
[1795603549.990921] [vm:14748:0]   +--------+-------------+-----------------------------------+
[1795603549.990921] [vm:14748:0]   | 9261829a-ae43-4015-bf77-2d373ff {where} cfg#0               |
[1795603549.990921] [vm:14748:0]   | {what} from host memory to host |
[1795603549.990921] [vm:14748:0]   +--------+-------------+-----------------------------------+
[1795603549.990921] [vm:14748:0]   | Range  | Description |              Config               |
[1795603549.990921] [vm:14748:0]   +--------+-------------+-----------------------------------+
[1795603549.990921] [vm:14748:0]   | 0..inf | zero-copy   | {how}                            |
[1795603549.990921] [vm:14748:0]   +--------+-------------+-----------------------------------+
"""
GET = "remote memory read by ucp_get*(multi)"
PUT = "remote memory write by ucp_put*"
AM = "active message by ucp_am_send*"


@pytest.mark.parametrize(
    ("where", "what", "how", "used"),
    [
        ("intra-node", GET, "tcp/lo", ("READ tcp/lo",)),
        ("inter-node", PUT, "rc_mlx5/mlx5_0:1", ("WRITE rc_mlx5/mlx5_0:1",)),
        (
            "inter-node", GET, "50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1",
            ("READ rc_mlx5/mlx5_0:1", "READ rc_mlx5/mlx5_1:1"),
        ),
        ("intra-node", AM, "tcp/lo", ()),
        ("self", PUT, "tcp/lo", ()),
    ],
)  # fmt: skip
def test_operations_on_another_processs_memory_count(where, what, how, used):
    """Messages do not: NIXL's notifications; nor what a process uses with itself."""
    assert transports_in(TABLE.format(where=where, what=what, how=how)) == used


def test_tables_follow_each_other():
    log = "".join(
        TABLE.format(where=where, what=what, how=how)
        for where, what, how in [
            ("self", PUT, "tcp/lo"), ("intra-node", PUT, "cma/memory"), ("intra-node", AM, "tcp/lo"),
            ("intra-node", GET, "cma/memory"), ("intra-node", GET, "cma/memory"),
        ]
    )  # fmt: skip

    assert transports_in(log) == ("WRITE cma/memory", "READ cma/memory")
    assert transports_in("something else | entirely") == ()


@pytest.mark.parametrize(
    ("used", "found"), [(("READ cma/memory", "WRITE tcp/lo"), True), (("READ cma/memory",), False), ((), False)]
)
def test_tcp_is_told_from_shared_memory(used, found):
    assert is_over_tcp(used) is found
