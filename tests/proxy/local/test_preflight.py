"""Sentences about what a machine lacks, before half a minute was spent on starting engines."""

import dataclasses
import socket

import pytest

from xpyd_proxy.local.errors import LocalError
from xpyd_proxy.local.plan import EngineKind, LocalPlan
from xpyd_proxy.local.preflight import GIB, Machine, check, free_memory, look

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
    ("port", "user", "option"),
    [
        (8000, "the router", "--port"),
        (8100, "prefill-0", "--prefill-port"),
        (5601, "the side channel of decode-0", "--side-channel-port"),
    ],
)
def test_a_taken_port_names_its_user_and_the_way_out(port, user, option):
    """One of them is usually an earlier `xpyd up` in another terminal."""
    assert complaints(taken_ports=frozenset({port})) == [
        f"port {port} for {user} is taken: stop what listens there, or choose another with {option}"
    ]


def test_ports_that_collide_with_each_other_are_told_apart_from_taken_ones():
    """Stopping what listens there would not help."""
    assert complaints(LocalPlan(port=8100)) == [
        "port 8100 is wanted by the router and by prefill-0: choose another with --prefill-port"
    ]


def test_a_port_out_of_range_is_not_called_taken():
    """65535 + 1 is a typing error."""
    assert complaints(LocalPlan(port=70000)) == [
        "port 70000 for the router is not between 1 and 65535: choose another with --port"
    ]


def test_too_little_memory_says_how_much_is_needed_and_there():
    """Otherwise the kernel kills an engine later, and says nothing."""
    (line,) = complaints(LocalPlan(prefill=2, decode=2), free_memory=3 * GIB)

    assert "4 engines need about 5.6 GiB of memory and 3.0 GiB are free" in line


def test_unknown_memory_is_no_reason_to_refuse():
    """Not every system says."""
    check(LocalPlan(), dataclasses.replace(GOOD, free_memory=None))


def test_a_full_disk_is_noticed():
    """Before a log file is cut off."""
    (line,) = complaints(free_disk=GIB // 10)

    assert ".xpyd needs about 0.25 GiB of disk and 0.10 GiB are free: make room" in line


def test_a_missing_package_names_the_ways_out():
    """`pip install xpyd` brings no engine."""
    assert complaints(missing_modules=frozenset({"vllm"})) == [
        "the Python package vllm is not installed: `make up` installs it, `--engine sim` does without"
    ]


def test_a_missing_lscpu_names_the_system_package():
    """vLLM fails without it, deep in a traceback."""
    (line,) = complaints(missing_programs=frozenset({"lscpu"}))

    assert "install the package util-linux" in line


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
        machine = look(LocalPlan(kind=EngineKind.SIM, port=port, home=tmp_path / "not" / "yet" / "there"))

    assert port in machine.taken_ports
    assert machine.free_disk > 0


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_free_memory_is_what_the_kernel_calls_available(tmp_path):
    """Caches can be given up, so that MemFree would be far too small."""
    write(tmp_path, "proc/meminfo", "MemTotal: 100 kB\nMemFree:  1 kB\nMemAvailable:  7 kB\n")

    assert free_memory(tmp_path) == 7 * 1024


@pytest.mark.parametrize(("limit", "expected"), [("4096\n", 1096), ("max\n", 7 * 1024)])
def test_a_container_may_have_less_than_its_host(tmp_path, limit, expected):
    """The kernel kills what exceeds the limit of the container."""
    write(tmp_path, "proc/meminfo", "MemAvailable:  7 kB\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", limit)
    write(tmp_path, "sys/fs/cgroup/memory.current", "3000\n")

    assert free_memory(tmp_path) == expected


def test_memory_is_unknown_where_the_system_does_not_say(tmp_path):
    """Such as on other systems than Linux."""
    assert free_memory(tmp_path) is None
