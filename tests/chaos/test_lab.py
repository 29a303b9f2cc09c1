"""The lab itself, without engines: a limit limits, a cut is silent, and nothing is left behind."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import netns

PORT = 5000
# Sends back whatever comes, to everybody, one after the other.
ECHO = """
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
while True:
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)
"""
# Takes what comes, and says one byte when it has so many.
SINK = """
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
connection, _ = listener.accept()
left = int(sys.argv[3])
while left:
    left -= len(connection.recv(1 << 16))
connection.sendall(b".")
"""
SOURCE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30)
start = time.monotonic()
connection.sendall(b"x" * int(sys.argv[3]))
connection.recv(1)
print(time.monotonic() - start)
"""
# Asks its peer something for every line it reads, and waits for so many seconds.
CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)
for line in sys.stdin:
    connection.settimeout(float(line))
    try:
        connection.sendall(b"?")
        print(connection.recv(1), flush=True)
    except OSError as exc:
        print(type(exc).__name__, flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def _here():
    if reason := netns.lab_available():
        pytest.skip(reason)


@pytest.fixture
def lab():
    with netns.open_lab() as lab:
        yield lab


@contextlib.contextmanager
def running(host, script, *args):
    """Run a script on a host; it has ended when the block has."""
    command = [*host.prefix, sys.executable, "-c", script, *map(str, args)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def listening(host, script, address, *args):
    with running(host, script, address, PORT, *args) as process:
        assert process.stdout.readline() == "listening\n"
        yield


def seconds_for(megabytes, source, sink):
    """Return how long it takes to send so much from one host to the other."""
    size = int(megabytes * 1e6)
    with listening(sink, SINK, sink.data_ip, size), running(source, SOURCE, sink.data_ip, PORT, size) as process:
        return float(process.stdout.readline())


def test_a_limit_limits_each_direction_and_can_be_lifted(lab):
    """4 megabytes at 40 Mbit/s take 0.8 s, less what passes in the first burst; without a limit, far less."""
    ways = [(lab.p, lab.d), (lab.d, lab.p)]
    free = [seconds_for(4, *way) for way in ways]
    lab.limit(40)
    limited = [seconds_for(4, *way) for way in ways]
    lab.limit(None)
    again = [seconds_for(4, *way) for way in ways]

    assert all(0.7 < seconds < 1.6 for seconds in limited), limited
    assert max(free + again) < min(limited) / 2


def test_the_management_network_is_never_limited(lab):
    """HTTP to the engines stays fast, whatever happens to the data link."""
    lab.limit(1)
    lab.cut()
    with listening(lab.d, ECHO, lab.d.mgmt_ip), socket.create_connection((lab.d.mgmt_ip, PORT), timeout=5) as peer:
        start = time.monotonic()
        for _ in range(20):
            peer.sendall(b"x" * 50_000)
            left = 50_000
            while left:
                left -= len(peer.recv(1 << 16))
        seconds = time.monotonic() - start

    assert seconds < 1


def test_a_cut_is_silent_and_heals(lab):
    """An open connection gets neither data nor an error while the link is cut, and goes on after it."""
    with listening(lab.d, ECHO, lab.d.data_ip), running(lab.p, CLIENT, lab.d.data_ip, PORT) as client:

        def ask(seconds):
            client.stdin.write(f"{seconds}\n")
            return client.stdout.readline().strip()

        before = ask(5)
        lab.cut()
        during = [ask(1), ask(1)]
        lab.heal()
        after = ask(10)

    assert before == after == "b'?'"
    assert during == ["TimeoutError", "TimeoutError"]


def test_nothing_is_left_behind():
    """Neither after the block, nor after a failure in it, nor of a run that was killed."""
    before = set(netns.namespaces()), set(netns.devices())
    with netns.open_lab() as lab, netns.open_lab() as second:
        assert {lab.p.namespace, second.d.namespace} <= set(netns.namespaces())
    with pytest.raises(RuntimeError), netns.open_lab():
        raise RuntimeError("a test fails")
    left = kill_a_run_that_has_a_lab()
    with netns.open_lab():
        pass

    assert left & set(netns.namespaces()) == set()
    assert (set(netns.namespaces()) - before[0], set(netns.devices()) - before[1]) == (set(), set())


def kill_a_run_that_has_a_lab():
    """Return the namespaces it leaves."""
    script = "from support.netns import *\nwith open_lab() as lab: print(lab.p.namespace, lab.d.namespace), input()"
    tests = str(Path(netns.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-u", "-c", script],
        env={**os.environ, "PYTHONPATH": tests},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        left = set(process.stdout.readline().split())
        process.kill()
    assert len(left) == 2
    assert left <= set(netns.namespaces())
    return left
