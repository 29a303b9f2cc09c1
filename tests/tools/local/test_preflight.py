"""Sentences about what a machine lacks, before half a minute was spent on starting engines."""

import dataclasses
import socket

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.plan import SMOLLM2_FOLDER, EngineKind, LocalPlan
from pdrelay_tools.local.preflight import GIB, Machine, check, free_memory, inspect_machine, safe_dtype, why_too_small
from pdrelay_tools.local.recipe import Connector

pytestmark = pytest.mark.edges


GOOD = Machine(
    taken_ports=frozenset(),
    missing_modules=frozenset(),
    missing_programs=frozenset(),
    free_memory=64 * GIB,
    free_disk=64 * GIB,
)


def complaints(plan=None, **found):
    with pytest.raises(LocalError) as caught:
        check(plan or LocalPlan(), dataclasses.replace(GOOD, **found))
    return str(caught.value).splitlines()


def test_a_good_machine_passes():
    """Nothing is asked of anybody."""
    check(LocalPlan(), GOOD)


@pytest.mark.parametrize(
    ("port", "says"),
    [
        (
            8100,
            "port 8100 is wanted by the router and by prefill-0: choose another with --prefill-port "
            "(make up PREFILL_PORT=...)",
        ),
        (70000, "port 70000 for the router is not between 1 and 65535: choose another with --port (make up PORT=...)"),
    ],
)
def test_a_port_that_cannot_be_is_not_called_taken(port, says):
    """Stopping what listens there would not help."""
    assert complaints(LocalPlan(port=port)) == [says]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"free_memory": 3 * GIB}, "4 engines need about 5.6 GiB of memory and 3.0 GiB are free"),
        ({"free_disk": GIB // 10}, ".pdrelay needs about 0.25 GiB of disk and 0.10 GiB are free: make room"),
        (
            {"missing_modules": frozenset({"vllm"})},
            "the Python package vllm is not installed: `make install` installs it, `--engine sim` does without",
        ),
        ({"missing_programs": frozenset({"lscpu"})}, "install the package util-linux"),
    ],
    ids=["memory", "disk", "package", "program"],
)
def test_what_is_missing_is_said_with_the_way_out(found, says):
    """Otherwise the kernel kills an engine later, a log is cut off, or vLLM fails deep in a traceback."""
    (line,) = complaints(LocalPlan(prefill=2, decode=2), **found)

    assert says in line


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"free_memory": 3 * GIB}, "it needs about 3.4 GiB of memory, and 3.0 GiB are free"),
        ({"free_disk": GIB // 2}, "it needs about 0.75 GiB of disk, and 0.50 GiB are free"),
        ({"free_memory": None}, None),
    ],
)
def test_a_machine_that_is_too_small_for_the_english_model_may_serve_the_tiny_one(found, says, monkeypatch, tmp_path):
    """It is said, and nothing is refused."""
    monkeypatch.chdir(tmp_path)
    machine = dataclasses.replace(GOOD, **found)

    assert why_too_small(LocalPlan(model=SMOLLM2_FOLDER), machine) == says
    check(LocalPlan(), machine)


def test_unknown_memory_is_no_reason_to_refuse():
    """Not every system says."""
    check(LocalPlan(), dataclasses.replace(GOOD, free_memory=None))


def test_everything_that_is_wrong_is_said_at_once():
    """Nobody wants to fix one thing per attempt."""
    assert len(complaints(taken_ports=frozenset({8000, 8100}), free_memory=0, free_disk=0)) == 4


def test_simulated_engines_need_ports_only():
    """They run wherever Python does."""
    poor = Machine(frozenset(), frozenset({"vllm"}), frozenset({"lscpu"}), 0, 0)

    check(LocalPlan(kind=EngineKind.SIM), poor)


def test_a_port_that_somebody_listens_on_is_found(tmp_path):
    """On loopback, where everything of ours listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        machine = inspect_machine(LocalPlan(kind=EngineKind.SIM, port=port, home=tmp_path / "not" / "yet" / "there"))

    assert port in machine.taken_ports
    assert machine.free_disk > 0


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_free_memory_is_what_the_kernel_calls_available(tmp_path):
    """Caches can be given up, so that MemFree would be far too small."""
    write(tmp_path, "proc/meminfo", "MemTotal: 100 kB\nMemFree:  1 kB\nMemAvailable:  7 kB\n")

    assert free_memory(tmp_path) == 7 * 1024


@pytest.mark.parametrize(
    ("limit", "files", "expected"), [("4096\n", 0, 1096), ("4096\n", 2500, 3596), ("max\n", 0, 7 * 1024)]
)
def test_a_container_may_have_less_than_its_host(tmp_path, limit, files, expected):
    """The kernel kills what exceeds the limit of the container, and drops cached files before."""
    write(tmp_path, "proc/meminfo", "MemAvailable:  7 kB\n")
    write(tmp_path, "sys/fs/cgroup/memory.stat", f"anon 400\nactive_file 100\ninactive_file {files}\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", limit)
    write(tmp_path, "sys/fs/cgroup/memory.current", "3000\n")

    assert free_memory(tmp_path) == expected


def test_memory_is_unknown_where_the_system_does_not_say(tmp_path):
    """Such as on other systems than Linux."""
    assert free_memory(tmp_path) is None


@pytest.mark.parametrize(
    ("flags", "dtype"), [("avx512_bf16 amx_bf16 amx_tile amx_int8", "float32"), ("avx2 avx512f avx512_bf16", None)]
)
def test_engines_on_a_cpu_with_amx_keep_off_its_tiles(tmp_path, flags, dtype):
    """vLLM 0.32.0's attention in bfloat16 ends a decode engine there at its first token."""
    write(tmp_path, "proc/cpuinfo", f"processor\t: 0\nflags\t\t: fpu {flags} arch_capabilities\n")

    assert safe_dtype(tmp_path) == dtype


def test_vllm_chooses_the_dtype_where_the_system_does_not_tell_of_its_cpu(tmp_path):
    """Such as on other systems than Linux."""
    assert safe_dtype(tmp_path) is None


def test_simulated_engines_have_no_kv_events():
    """They would be refused one by one, later, and in the log."""
    plan = LocalPlan(kind=EngineKind.SIM, kv_events=True)

    assert complaints(plan) == [
        "simulated engines have no cache to tell of: leave out --kv-events, or write --engine vllm"
    ]


@pytest.mark.parametrize("mode", TransferMode)
def test_kv_goes_back_with_our_connector_alone(mode):
    """vLLM's connector would ignore it without a word."""
    check(LocalPlan(return_kv=True, mode=mode, connector=Connector.PDRELAY), GOOD)

    assert complaints(LocalPlan(return_kv=True, mode=mode, connector=Connector.NIXL)) == [
        "--return-kv works with our connector alone: leave it out, or write --connector pdrelay"
    ]
