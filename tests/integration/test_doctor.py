"""``pdrelay doctor`` with real NIXL between processes: each fault is named with its mend.

The two ends are in network namespaces of their own, where the kernel lets us have them.
"""

import contextlib
import json
import subprocess
from types import SimpleNamespace

import pytest

from support.doctor_process import examined, listening
from support.netns import DATA, lab_available, lab_or_none
from support.slow_memory import COMPILER, NEEDED, slow

# Each test has two ends of its own, which measure for seconds.
pytestmark = [pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(240)]
TCP = {"UCX_TLS": "tcp"}
RATES = {"read-slower", "write-slower", "asymmetric-link"}  # a busy machine may show any of them, of itself
SLOW_MB_PER_S = 5.0
SHARED = {"tcp-on-one-machine"}  # all ends here are on one machine


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    """The file of a secret that the ends share."""
    path = tmp_path_factory.mktemp("secrets") / "shared"
    path.write_text("a secret of the engines of this test\n")
    return ("--secret-file", path)


@pytest.fixture(scope="module")
def lab_if_any():
    with lab_or_none() as lab:
        yield lab


@pytest.fixture
def lab(lab_if_any):
    if lab_if_any is None:
        pytest.skip(lab_available() or "there was no network lab")
    return lab_if_any


@pytest.fixture
def ends(lab_if_any):
    """Where both ends run: on two hosts of a lab if there can be one, else on loopback."""
    if lab_if_any is None:
        return SimpleNamespace(ip="127.0.0.1", here=[], there=[])
    return SimpleNamespace(ip=lab_if_any.p.data_ip, here=lab_if_any.d.prefix, there=lab_if_any.p.prefix)


@contextlib.contextmanager
def blocked(host, ports):
    """Let no TCP packet to these ports leave a host."""
    rule = ("ipproto", "tcp", "dport", ports, "prohibit")
    subprocess.run(["ip", "-n", host.namespace, "rule", "add", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "-n", host.namespace, "rule", "del", *rule], check=True)


def model(folder, name, **changes):
    """A folder with a model's config.json."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "torch_dtype": "bfloat16"}
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps({**config, **changes}))
    return ("--model", folder / name)


def test_two_ends_of_one_machine_use_shared_memory_and_nothing_is_wrong(ends, secret):
    """Every number is there: rates and latency each way, posting, clock, versions, MTU, transports.

    A network of its own is no obstacle, and nothing that the mend of `tcp-on-one-machine` names is missing.
    """
    with listening("--host", ends.ip, "--port", 0, *secret, prefix=ends.there) as address:
        found = examined(address, *secret, prefix=ends.here)
    pair = found.report["pair"]

    assert set(found.findings) <= RATES
    assert [(each["end"], each["measurement"]["operation"]) for each in pair["measurements"]] == [
        ("here", "READ"), ("here", "WRITE"), ("there", "READ"), ("there", "WRITE"),
    ]  # fmt: skip
    for each in pair["measurements"]:
        measured = each["measurement"]
        assert measured["failure"] == ""
        assert min(measured["bytes"], measured["latency_seconds"], measured["posting_seconds"]) > 0
    assert abs(pair["clock"]["seconds"]) <= pair["clock"]["error"] + 0.001
    assert pair["back_failure"] == ""
    for end in (pair["here"], pair["there"]):
        assert min(end["nixl"], end["ucx"], end["pdrelay"], end["interface"]) > ""
        assert end["mtu"] > 0
        assert end["registration_seconds"] > 0
    assert any("memory" in each for each in pair["transports_here"])


@pytest.mark.parametrize(
    ("there", "mend"),
    [
        ({"env": TCP}, "remove UCX_TLS=tcp at "),
        ({"prefix": ["unshare", "--ipc"]}, "give both containers one IPC namespace"),
        (
            {"prefix": ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]},
            "give both containers one PID namespace",
        ),
    ],
    ids=["variable", "ipc", "pid"],
)
def test_tcp_where_shared_memory_was_possible(lab, secret, there, mend):
    """It is what one variable in an image, or a container, does to everybody, silently."""
    there = there | {"prefix": [*lab.p.prefix, *there.get("prefix", ())]}
    with listening("--host", lab.p.data_ip, "--port", 0, *secret, **there) as address:
        found = examined(address, *secret, prefix=lab.d.prefix)

    assert found.code == 1
    assert "over TCP (" in found.findings["tcp-on-one-machine"].what
    assert mend in found.findings["tcp-on-one-machine"].mend


def test_a_wrong_secret_and_none(ends, secret, tmp_path):
    """Both are found before NIXL is loaded, and neither end says more than that they differ."""
    other = tmp_path / "other"
    other.write_text("another secret than that of the engines\n")
    with listening("--host", ends.ip, "--port", 0, *secret, prefix=ends.there) as address:
        wrong = examined(address, "--secret-file", other, prefix=ends.here)
        none = examined(address, prefix=ends.here)

    for found in (wrong, none):
        assert found.code == 1
        assert list(found.findings) == ["secret"]
        assert "PDRELAY_CONNECTOR_SECRET_FILE" in found.findings["secret"].mend
        assert found.report["pair"]["there"] is None


def test_a_skewed_clock_and_another_fingerprint(ends, secret, tmp_path):
    """Beyond what signed leases bear, and a model of another shape.

    The skew is put into the other end's process: a time namespace has the clocks since boot, and never the wall clock.
    """
    here, there = model(tmp_path, "m"), model(tmp_path, "n", num_hidden_layers=3)
    at = ("--host", ends.ip, "--port", 0)
    with listening(*at, *secret, *there, ahead=400.0, prefix=ends.there) as address:
        found = examined(address, *secret, *here, prefix=ends.here)

    assert {"clock", "fingerprint"} <= set(found.findings) <= {"clock", "fingerprint"} | RATES
    assert "ahead of" in found.findings["clock"].what
    assert "NTP" in found.findings["clock"].mend
    assert "its layers is 3, ours is 2" in found.findings["fingerprint"].what
    assert abs(found.report["pair"]["clock"]["seconds"] - 400.0) <= found.report["pair"]["clock"]["error"] + 0.1


def test_an_asymmetric_link(lab, secret):
    """One direction is slow, whichever end asks for the bytes."""
    limit = ("tbf", "rate", "50mbit", "burst", "64kb", "latency", "50ms")
    subprocess.run(["tc", "-n", lab.p.namespace, "qdisc", "replace", "dev", DATA, "root", *limit], check=True)
    try:
        with listening("--host", lab.p.data_ip, "--port", 0, *secret, prefix=lab.p.prefix, env=TCP) as address:
            found = examined(address, *secret, prefix=lab.d.prefix, env=TCP)
    finally:
        lab.limit(None)

    slow = found.findings["asymmetric-link"]
    assert set(found.findings) <= RATES | SHARED
    assert f"bytes go from here ({lab.d.data_ip}) to there" in slow.what
    assert "let here" in slow.mend


@pytest.mark.skipif(COMPILER is None, reason=NEEDED)
@pytest.mark.parametrize(
    ("operation", "name", "mode"), [("READ", "read-slower", "push"), ("WRITE", "write-slower", "pull")]
)
def test_an_operation_that_is_slow(secret, operation, name, mode):
    """The same bytes, the same direction, and half of the ways to move them is slow: what to set is said."""
    # The fast one has a rate, too: how fast memory is copied each way depends on what else a busy machine does.
    env = slow(**{"READ": 100, "WRITE": 100, operation: SLOW_MB_PER_S})
    with listening("--host", "127.0.0.1", "--port", 0, *secret, env=env) as address:
        # As long as for a user: in a tenth of it each round is one transfer, and one pause of it decides.
        found = examined(address, *secret, "--seconds", "1", env=env)

    assert RATES & set(found.findings) == {name}
    assert f"set mode: {mode} on both" in found.findings[name].mend
    all_measured = [each["measurement"] for each in found.report["pair"]["measurements"]]
    slow_ones = [measured for measured in all_measured if measured["operation"] == operation]
    assert len(slow_ones) == 2  # one of each end
    for measured in slow_ones:
        assert 0 < measured["bytes"] / measured["seconds"] < SLOW_MB_PER_S * 1e6  # what the link bears


def test_a_port_that_is_blocked_one_way(lab, secret):
    """The prefill machine cannot dial the decode machine; all else works."""
    here = {"prefix": lab.d.prefix, "env": TCP}
    there = {"prefix": lab.p.prefix, "env": TCP}
    with listening("--host", lab.p.data_ip, "--port", 0, *secret, **there) as address, blocked(lab.p, "20999"):
        found = examined(address, "--port", 20999, *secret, **here)

    assert set(found.findings) <= RATES | SHARED | {"blocked-port"}
    assert f"at {lab.d.data_ip}:20999" in found.findings["blocked-port"].what
    assert "open that port towards here" in found.findings["blocked-port"].mend
    assert len(found.report["pair"]["measurements"]) == 4


def test_a_data_plane_that_is_blocked(lab, secret):
    """The side channel's port is open, UCX's are not: the usual firewall. UCX connects both ways for either end."""
    ports = "47000-47099"
    there = {"prefix": lab.p.prefix, "env": {**TCP, "UCX_TCP_PORT_RANGE": ports}}
    with listening("--host", lab.p.data_ip, "--port", 0, *secret, **there) as address, blocked(lab.d, ports):
        found = examined(address, "--timeout", 4, *secret, prefix=lab.d.prefix, env=TCP)

    assert set(found.findings) <= RATES | SHARED | {"data-plane"}
    assert "moves nothing to or from there" in found.findings["data-plane"].what
    assert "open the TCP ports of UCX of there" in found.findings["data-plane"].mend
    assert f"UCX_NET_DEVICES is {DATA}" in found.findings["data-plane"].mend
