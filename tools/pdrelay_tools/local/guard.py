"""Outlives its parent for a moment, to end the parent's process groups and remove their files.

``pdrelay_tools.local.processes`` runs it as ``python -m pdrelay_tools.local.guard DIRECTORY``. The
parent writes ``+GROUP`` and ``-GROUP`` lines; the end of the input means that the parent is gone,
however it died. It uses the standard library only, so that it starts at once and stays small.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

GRACE_S = 10.0
POLL_S = 0.02
PROC = Path("/proc")


def main() -> int:
    """Listen until the parent is gone, then end what is left."""
    groups = listen(sys.stdin)
    end_groups(groups, grace_s=GRACE_S)
    for directory in sys.argv[1:]:
        # gone already, unless the parent could not do it
        shutil.rmtree(directory, ignore_errors=True)
    return 0


def listen(lines: Iterable[str]) -> set[int]:
    """Read the parent's lines to their end; return the groups that are still running."""
    groups: set[int] = set()
    for line in lines:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    return groups


def end_groups(
    groups: Iterable[int], *, grace_s: float, reap: Callable[[], object] = lambda: None
) -> None:
    """Ask every group to end, and kill what has not after `grace_s` seconds.

    `reap` is called again and again: a parent collects its dead children there.
    """
    running = {group for group in groups if send(group, signal.SIGTERM, signal.SIGCONT)}
    deadline = time.monotonic() + grace_s
    try:
        while running and time.monotonic() < deadline:
            time.sleep(POLL_S)
            reap()
            running = {group for group in running if runs(group)}
        reap()  # those that ended after the last call
    finally:  # also when a second Ctrl-C cuts the wait short
        for group in running:
            send(group, signal.SIGKILL)


def runs(group: int) -> bool:
    """Tell whether a process of the group runs.

    On Linux zombies do not count: init may collect them a second later.
    """
    if not send(group):
        return False
    return not (PROC / "self/stat").exists() or any(
        _runs_in(group, path) for path in PROC.glob("[0-9]*/stat")
    )


def _runs_in(group: int, path: Path) -> bool:
    try:
        # the name before may hold anything
        fields = path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it ended meanwhile
        return False
    state = fields[0]
    its_group = int(fields[2])
    threads = int(fields[17])
    # a zombie leader with more threads: its other threads still run
    return its_group == group and (state not in "ZX" or threads > 1)


def send(group: int, *signals: signal.Signals) -> bool:
    """Send signals to a process group; False: it has no process any more."""
    try:
        for number in signals or (0,):
            os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        # macOS says the latter of a group that holds only zombies
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
