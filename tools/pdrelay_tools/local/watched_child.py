"""Runs a child that writes files into a folder: reports its progress, and kills it at a limit."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pdrelay_proxy.core.one_line import one_line
from pdrelay_tools.local import guard
from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.processes import open_file

POLL_S = 0.1
LOG = "log"  # in its folder
MOST_WORDS = 300  # characters of its log in a sentence


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """When a child is given up."""

    silence_s: float  # without a byte more in its folder
    most_s: float  # in all
    most_bytes: int  # in its folder


def run_watched(
    argv: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    limits: ChildLimits,
    *,
    report: Callable[[int, float], None],
    last_words: Callable[[str], str],
) -> None:
    """Run a program to its end; `report` gets the size of its largest file and the seconds so far.

    Raises LocalError with the `last_words` of its log, and with the limit that it was ended for.
    """
    start = time.monotonic()
    moved_at = start
    most_seen = 0
    log = folder / LOG
    with open_file(log, append=False) as output:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends it
        )
    try:
        is_over = False
        while not is_over:  # one that is over at once is reported, too
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            is_over = process.poll() is not None
            now = time.monotonic()
            sizes = _sizes(folder)
            size = sum(sizes)
            if size > most_seen:
                moved_at = now
                most_seen = size
            report(max(sizes, default=0), now - start)
            if most_seen > limits.most_bytes:
                raise LocalError(f"it wrote more than {limits.most_bytes:,} bytes")
            if not is_over and now - moved_at > limits.silence_s:
                raise LocalError(
                    f"for {limits.silence_s:.0f} s nothing came{_quoted(log, last_words)}"
                )
            if not is_over and now - start > limits.most_s:
                raise LocalError(
                    f"it was not done after {limits.most_s:.0f} s{_quoted(log, last_words)}"
                )
    finally:
        if process.poll() is None:
            guard.send(process.pid, signal.SIGKILL)  # and all that it has started
            process.wait()
    if process.returncode != 0:
        raise LocalError(_words(log, last_words) or f"it ended with exit code {process.returncode}")


def _sizes(folder: Path) -> list[int]:
    """Return the sizes of all files, but for those that the child removes meanwhile."""
    sizes = list[int]()
    # os.walk skips folders that are gone; rglob raises
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                sizes.append((Path(place) / name).stat().st_size)
    return sizes


def _quoted(log: Path, last_words: Callable[[str], str]) -> str:
    words = _words(log, last_words)
    return f": {words}" if words else ""


def _words(log: Path, last_words: Callable[[str], str]) -> str:
    return one_line(last_words(log.read_text(errors="replace")))[:MOST_WORDS]
