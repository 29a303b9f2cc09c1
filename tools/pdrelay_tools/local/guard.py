"""Outlives its parent for a moment, ends the process groups that the parent had started, and
removes their files.

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
    """Follow the parent's book-keeping to its end; return the groups that are still running."""
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
    left = {group for group in groups if send(group, signal.SIGTERM, signal.SIGCONT)}
    deadline = time.monotonic() + grace_s
    try:
        while left and time.monotonic() < deadline:
            time.sleep(POLL_S)
            reap()
            left = {group for group in left if runs(group)}
        reap()  # who ended after the last time
    finally:  # also when a second Ctrl-C cuts the wait short
        for group in left:
            send(group, signal.SIGKILL)


def runs(group: int) -> bool:
    """Tell whether anybody in a process group runs; on Linux the dead do not, whom init may collect
    a second later.
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
    # of a process that dies the others go after it
    return its_group == group and (state not in "ZX" or threads > 1)


def send(group: int, *signals: signal.Signals) -> bool:
    """Send signals to a process group; False when nobody is left in it."""
    try:
        for number in signals or (0,):
            os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        # macOS says the latter of a group that holds only zombies
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
