"""Processes by /proc: what a child and everything it started costs, and whether it stands still."""

import contextlib
import os
import statistics
import time
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def pids_of(leader):
    """Return the processes of the session that a process leads, as every child of a fleet does."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == leader:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue
    return found


def cpu_seconds(leader):
    """Return the CPU-seconds that a process and all processes of its session have used."""
    total = 0.0
    for pid in pids_of(leader):
        with contextlib.suppress(OSError):  # it ended meanwhile
            total += _cpu_seconds(Path(f"/proc/{pid}"))
    return total


def cpu_by_thread(child):
    """Return the CPU-seconds of every thread so far: {(pid, tid): seconds}."""
    return {
        (pid, int(task.name)): _cpu_seconds(task)
        for pid in pids_of(child.pid)
        for task in Path(f"/proc/{pid}/task").iterdir()
    }


def idle_cores(children, *, windows=5, seconds=1.0):
    """Return for each child (share of a core of all its threads, of its busiest thread): medians of several windows."""
    shares = [[] for _ in children]
    for _ in range(windows):
        before = [cpu_by_thread(child) for child in children]
        start = time.monotonic()
        time.sleep(seconds)
        after = [cpu_by_thread(child) for child in children]
        lasted = time.monotonic() - start
        for found, old, new in zip(shares, before, after, strict=True):
            used = [(cpu - old.get(thread, cpu)) / lasted for thread, cpu in new.items()]
            found.append((sum(used), max(used)))
    return [tuple(map(statistics.median, zip(*found, strict=True))) for found in shares]


def memory(child):
    """Return the resident bytes of a child's processes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in pids_of(child.pid))


def held_by(pid):
    """Return what one process has: resident bytes, descriptors, threads."""
    place = Path(f"/proc/{pid}")
    resident = int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, len(list((place / "fd").iterdir())), len(list((place / "task").iterdir()))


def threads(child):
    """Return how many threads its processes have."""
    return sum(1 for pid in pids_of(child.pid) for _ in Path(f"/proc/{pid}/task").iterdir())


def sockets(child):
    """Return how many sockets its processes have open."""
    return sum(
        _target(fd).startswith("socket:") for pid in pids_of(child.pid) for fd in Path(f"/proc/{pid}/fd").iterdir()
    )


def wait_stopped(*pids):
    """Return when no thread of these processes runs any more, which have been sent SIGSTOP.

    ``kill`` returns before that: the signal goes to one thread of a process, and only when that one gets a core are the
    others told. Until then, tens of milliseconds on a busy machine, they go on.
    """
    end = time.monotonic() + 10
    while running := {thread: state for pid in pids for thread, state in states(pid).items() if state not in "TtZX"}:
        assert time.monotonic() < end, f"10 s after SIGSTOP these threads are not stopped: {running}"
        time.sleep(0.0005)


def states(pid):
    """Return the state of every thread of a process: {tid: letter}."""
    found = {}
    with contextlib.suppress(OSError):  # it ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found[int(task.name)] = _stat(task)[0]
    return found


def waited_s(thread):
    """Return for how long a thread was ready and had no core, in seconds; 0 where Linux does not count it."""
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _cpu_seconds(task):
    fields = _stat(task)
    return (int(fields[11]) + int(fields[12])) / TICK


def _stat(task):
    """Return the fields of a process or thread, from its state on."""
    # The name, in parentheses, may hold anything: the fields begin behind the last one.
    return (task / "stat").read_text().rpartition(")")[2].split()


def _target(link):
    try:
        return str(link.readlink())
    except FileNotFoundError:  # closed meanwhile
        return ""
