"""From facts to findings: each fault alone is named once, with its value and the setting that mends it."""

import pytest

from pdrelay_connector.core.doctor.diagnoses import diagnose
from pdrelay_connector.core.doctor.examination import EndFacts, Measurement
from pdrelay_connector.core.doctor.pair_facts import ClockOffset, MeasuredBy, PairFacts
from support.engines import FINGERPRINT, changed

HERE = EndFacts(
    "d0", pdrelay="1", nixl="1.5.1", ucx="1.20.0", vllm="0.32.0", address="10.0.0.2", interface="eth0", mtu=9000,
    machine="boot-1", ipc_namespace="ipc:[1]", pid_namespace="pid:[1]", shared_memory=1 << 30,
    environment=("UCX_NET_DEVICES=eth0",), memory_bytes=10**9, registration_seconds=0.2,
)  # fmt: skip
THERE = changed(HERE, host="p0", address="10.0.0.1", machine="boot-2")


def moved(end, operation, rate, worst=None):
    """A measurement of so many GB/s, and at worst of fewer."""
    measured = Measurement(operation, 32768, bytes=10**9, seconds=1 / rate, descriptors=1000)
    return MeasuredBy(end, measured, worst or rate)


def rates(here_read=10.0, here_write=10.0, there_read=10.0, there_write=10.0):
    return [
        moved("here", "READ", here_read),
        moved("here", "WRITE", here_write),
        moved("there", "READ", there_read),
        moved("there", "WRITE", there_write),
    ]


def facts(**changes):
    """A healthy pair of two machines, but for these."""
    well = {
        "here": HERE, "there": THERE, "clock": ClockOffset(0.001, 0.0005), "back_address": "10.0.0.2:40000",
        "back_failure": "", "measurements": rates(), "transports_here": ("rc_mlx5/mlx5_0:1",),
        "transports_there": ("rc_mlx5/mlx5_0:1",), "model_here": FINGERPRINT, "model_there": FINGERPRINT,
    }  # fmt: skip
    return PairFacts(address="10.0.0.1:5690", **{**well, **changes})


def test_a_healthy_pair_has_no_findings():
    assert diagnose(facts()) == []


def test_nothing_is_found_where_nothing_is_known():
    """An end that could not be met has no facts to judge."""
    assert diagnose(PairFacts(address="p0:5690", here=EndFacts("d0"))) == []


SLOW_LINK = rates(here_write=1.0, there_read=1.0)
FAULTS = {
    "secret": ({"connect_failure": "p0:1 refused: the shared secret (PDRELAY_CONNECTOR_SECRET) is missing or differs"},
               "missing or differs", "PDRELAY_CONNECTOR_SECRET_FILE"),
    "unreachable": ({"connect_failure": "cannot connect to 10.0.0.1:5: timed out"}, "timed out", "open that TCP port"),
    "lost": ({"lost": "it closed the connection"}, "closed", "other end's output"),
    "data-plane": ({"measurements": [MeasuredBy("here", Measurement("READ", 1, failure="not within 5 s"), 0.0)]},
                   "NIXL at d0 moves nothing to or from p0: not within 5 s", "ports of UCX of p0"),
    "blocked-port": ({"back_failure": "cannot connect to 10.0.0.2:40000: timed out"},
                     "p0 cannot connect to d0 at 10.0.0.2:40000", "open that port towards d0"),
    "fingerprint": ({"model_there": changed(FINGERPRINT, dtype="fp32")}, "its dtype is 'fp32', ours is 'bf16'",
                    "same model"),
    "read-slower": ({"measurements": rates(here_read=1.0)}, "READ (pull) moves 1 GB/s from p0 to d0",
                    "set mode: push on both if p0 prefills"),
    "write-slower": ({"measurements": rates(there_write=1.0)}, "WRITE (push) 1 GB/s",
                     "set mode: pull on both if p0 prefills"),
    "asymmetric-link": ({"measurements": SLOW_LINK}, "from p0 to d0 at 10 GB/s and the other way at 1 GB/s",
                        "let p0 prefill and d0 decode"),
    "clock": ({"clock": ClockOffset(-400.0, 0.01)}, "400.000 s behind", "NTP"),
    "version-nixl": ({"there": changed(THERE, nixl="1.6")}, "NIXL is 1.5.1 at d0 and 1.6 at p0", "one version of NIXL"),
    "version-ucx": ({"there": changed(THERE, ucx="1.18")}, "UCX is 1.20.0", "one version of UCX"),
    "version-vllm": ({"there": changed(THERE, vllm="0.31")}, "vLLM is 0.32.0", "refuse each other"),
    "mtu": ({"there": changed(THERE, mtu=1500)}, "the MTU is 9000 at d0 (eth0) and 1500 at p0", "ip link set"),
    "registration": ({"there": changed(THERE, registration_seconds=3.0)}, "3 s for each GB at p0", "memlock"),
    "loopback": ({"there": changed(THERE, address="127.0.0.1")}, "is on 127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_HOST"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_once_with_its_value_and_its_mend(name):
    """And nothing beside it."""
    changes, value, mend = FAULTS[name]
    (finding,) = diagnose(facts(**changes))

    assert finding.name == name
    assert value in finding.what
    assert mend in finding.mend
    assert finding.sentence == f"{finding.what}; {finding.mend}"


TCP = {"transports_here": ("READ tcp/eth0",), "transports_there": ("READ tcp/eth0",)}
ONE_MACHINE = changed(THERE, machine="boot-1")


@pytest.mark.parametrize(
    ("there", "mend"),
    [
        (changed(ONE_MACHINE, environment=("UCX_TLS=tcp",)), "remove UCX_TLS=tcp at p0"),
        (changed(ONE_MACHINE, environment=("UCX_TLS=^sm",)), "remove UCX_TLS=^sm at p0"),
        (changed(ONE_MACHINE, ipc_namespace="ipc:[2]"), "one IPC namespace (docker --ipc host; hostIPC of pods"),
        (changed(ONE_MACHINE, pid_namespace="pid:[2]"), "one PID namespace (docker --pid host; hostPID of pods"),
        (
            changed(ONE_MACHINE, ipc_namespace="ipc:[2]", pid_namespace="pid:[2]"),
            "give both containers one IPC and one PID namespace (docker --ipc host --pid host; hostIPC and hostPID of "
            "pods, which the chart sets by engine.hostNamespaces)",
        ),
        (changed(ONE_MACHINE, shared_memory=1 << 20), "enlarge /dev/shm at p0, of which 1 MiB are free"),
        (ONE_MACHINE, "ptrace"),
        (changed(ONE_MACHINE, environment=("UCX_TLS=tcp,sm",)), "ptrace"),
        (changed(ONE_MACHINE, environment=("UCX_TLS=all",)), "ptrace"),
    ],
)
def test_tcp_on_one_machine_is_mended_where_shared_memory_is_off(there, mend):
    """The nearest cause first: what the operator has set, then namespaces, then the size."""
    (finding,) = diagnose(facts(there=there, **TCP))

    assert finding.name == "tcp-on-one-machine"
    assert mend in finding.mend


@pytest.mark.parametrize(
    ("here", "there", "named"), [("auto", "on", "at d0 (auto)"), ("on", "off", "at p0 (off)"), ("on", "on", "")]
)
def test_a_gpu_that_is_written_by_cuda_ipc_and_read_by_tcp_is_mended_by_ucx(here, there, named):
    """Seen on an H200 whose NVLinks were hidden: 0.4 GB/s one way, hundreds the other."""
    variable = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    ends = (
        changed(HERE, environment=(f"{variable}={here}",)),
        changed(ONE_MACHINE, environment=(f"{variable}={there}",)),
    )
    used = {"transports_here": ("READ tcp/lo", "WRITE cuda_ipc/cuda"), "transports_there": ()}
    (finding,) = diagnose(facts(here=ends[0], there=ends[1], **used))

    assert finding.name == "tcp-on-one-machine"
    assert (f"set {variable}=on {named}" in finding.mend) if named else (variable not in finding.mend)


def test_tcp_between_machines_is_right_without_rdma_and_wrong_with_it():
    """TCP is what UCX falls back to, silently."""
    ports = {"rdma": ("mlx5_0:1",)}

    assert diagnose(facts(**TCP)) == []
    (finding,) = diagnose(facts(here=changed(HERE, **ports), there=changed(THERE, **ports), **TCP))
    assert finding.name == "tcp-despite-rdma"
    assert "UCX_TLS=rc" in finding.mend


@pytest.mark.parametrize(("seconds", "found"), [(29.0, False), (30.2, False), (31.0, True), (-31.0, True)])
def test_a_clock_is_judged_by_what_the_measurement_can_know(seconds, found):
    """Half of the way there and back may be all of the difference."""
    findings = diagnose(facts(clock=ClockOffset(seconds, 0.5)))

    assert [each.name for each in findings] == (["clock"] if found else [])


def test_a_rate_that_one_round_alone_reached_proves_nothing():
    """Another load may have slowed the others down."""
    lucky = [moved(end, operation, 10.0, worst=1.5) for end, operation in [("here", "WRITE"), ("there", "READ")]]
    others = [moved(end, operation, 1.0) for end, operation in [("there", "WRITE"), ("here", "READ")]]

    assert diagnose(facts(measurements=lucky + others)) == []


def test_ends_with_one_host_name_are_told_apart():
    """Containers of one image, and network namespaces."""
    findings = diagnose(facts(there=changed(THERE, host="d0"), back_failure="timed out"))

    assert findings[0].what.startswith("there (10.0.0.1:5690) cannot connect to here (10.0.0.2)")
