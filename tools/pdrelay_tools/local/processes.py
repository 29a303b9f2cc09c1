"""Child processes that end with their parent: each in its own group, with a log file.

Each has a directory for temporary files (``TMPDIR``), which is removed with it: vLLM leaves its
sockets and its rendezvous file there.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from pdrelay_tools.local import guard
from pdrelay_tools.local.errors import ChildFailed

POLL_S = 0.1
TAIL_BYTES = 65536
# for this user alone: logs have prompts and addresses in them
DIRECTORY = 0o700
FILE = 0o600
# The path of a Unix socket has at most 107 bytes (103 on macOS), of which vLLM's own name takes 37,
# ours 20.
LONGEST_TEMP = 45  # bytes


@dataclass(frozen=True, slots=True)
class Command:
    """A program, and the URL that shows that it serves."""

    name: str  # of the log file, and in messages
    argv: Sequence[str]
    environment: Mapping[str, str]  # the whole of it
    health_url: str  # answers 200 once the program serves


class Child:
    """A running (or ended) program."""

    def __init__(
        self, command: Command, process: subprocess.Popen[bytes], log: Path, temp: Path
    ) -> None:
        self.command = command
        self.log = log
        self.temp = temp  # its directory for temporary files
        self._process = process

    @property
    def name(self) -> str:
        """The name of its command."""
        return self.command.name

    @property
    def pid(self) -> int:
        """Of the program itself, and of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether the program still runs."""
        return self.exit_code is None

    @property
    def log_size(self) -> int:
        """Bytes that it has written to its log."""
        return self.log.stat().st_size

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of its log."""
        return "\n".join(self._end_of_log().splitlines()[-lines:])

    def cause(self) -> str | None:
        """Return the first exception in the log's end: vLLM's last one is only its consequence."""
        match = re.search(
            r"^(?:.*\] )?([\w.]*(?:Error|Exception|Exit): .+)$", self._end_of_log(), re.MULTILINE
        )
        return match[1] if match else None

    def _end_of_log(self) -> str:
        with self.log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode(errors="replace")

    def raise_if_dead(self) -> None:
        """Raise ChildFailed, with the end of the log, unless it runs."""
        code = self.exit_code
        if code is not None:  # a signal, if it is negative
            ending = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            because = f", probably because of {cause}" if (cause := self.cause()) else ""
            raise ChildFailed(f"{self.name} {ending}{because}", self.log, self.tail())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program and to everything it started."""
        guard.send(self.pid, number)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code; raises subprocess.TimeoutExpired after `timeout_s` seconds."""
        return self._process.wait(timeout_s)


class Patience:
    """Decides when to give up children that start: a log that grows shows progress."""

    def __init__(self, silence_s: float, most_s: float, *, now: float) -> None:
        """``silence_s``: seconds in which no log grows; ``most_s``: seconds in all."""
        self._silence_s = silence_s
        self._end = now + most_s
        self._moved_at = now
        self._sizes: dict[str, int] = {}

    def is_over(self, sizes: Mapping[str, int], *, now: float) -> bool:
        """Take the present sizes of the logs, and return whether to give up."""
        if any(size > self._sizes.get(name, 0) for name, size in sizes.items()):
            self._moved_at = now
        self._sizes.update(sizes)
        return now > self._end or now - self._moved_at > self._silence_s

    def silence(self, *, now: float) -> float:
        """Return the seconds since a log grew."""
        return now - self._moved_at


class ProcessGroup:
    """The children of one :func:`open_fleet` block."""

    def __init__(
        self, log_dir: Path, temp: Path, guard_input: IO[bytes], *, grace_s: float
    ) -> None:
        self.children: list[Child] = []
        self._log_dir = log_dir
        self._temp = temp
        self._numbers = itertools.count(1)
        self._guard_input = guard_input
        self._grace_s = grace_s  # between asking a child to end and killing it
        self._logs: set[Path] = set()

    def start(self, command: Command) -> Child:
        """Start a program; a name that is started again continues its log.

        Raises OSError when it cannot be run.
        """
        log = self._log_dir / f"{command.name}.log"
        temp = self._temp / str(next(self._numbers))
        temp.mkdir()
        with open_file(log, append=log in self._logs) as file:
            process = subprocess.Popen(
                command.argv,
                env={**command.environment, "TMPDIR": str(temp)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # its own group; and Ctrl-C reaches only this process, which then stops it
                start_new_session=True,
            )
        self._logs.add(log)
        self._tell_guard(f"+{process.pid}")
        child = Child(command, process, log, temp)
        self.children.append(child)
        return child

    def wait_ready(
        self,
        children: Iterable[Child],
        *,
        timeout_s: float = 180.0,
        most_s: float | None = None,
        report: Callable[[Sequence[str], float], None] = lambda _names, _seconds: None,
    ) -> None:
        """Return when all of them serve at the same time.

        Raises ChildFailed, after `timeout_s` seconds at the latest.

        With `most_s` a child that writes to its log is given more time: `timeout_s` seconds from
        its last line on, and `most_s` in all.

        A child that has served is checked again: a router that started before its engines is
        healthy until its first probe of them, and then unhealthy until a later one.

        All other children must live, too. `report` gets the names of the children that do not serve
        yet, and the seconds since the wait began, again and again.
        """
        children = list(children)
        start = time.monotonic()
        patience = Patience(timeout_s, timeout_s if most_s is None else most_s, now=start)
        with httpx.Client(timeout=1.0, trust_env=False) as client:
            while missing := [child for child in children if not _serves(client, child)]:
                now = time.monotonic()
                seconds = now - start
                report([child.name for child in missing], seconds)
                self.raise_if_dead()
                if patience.is_over({child.name: child.log_size for child in missing}, now=now):
                    first = missing[0]
                    silent = ""
                    if most_s is not None:
                        silent = (
                            f", and its log got its last line {patience.silence(now=now):.0f} s ago"
                        )
                    raise ChildFailed(
                        f"{first.name} is not ready after {seconds:.0f} s{silent}",
                        first.log,
                        first.tail(),
                    )
                time.sleep(POLL_S)

    def raise_if_dead(self) -> None:
        """Raise ChildFailed when a child has ended by itself."""
        for child in self.children:
            child.raise_if_dead()

    def stop(self, *children: Child) -> None:
        """End children and their descendants: SIGTERM, then SIGKILL after the grace time."""
        try:
            guard.end_groups(
                [child.pid for child in children],
                grace_s=self._grace_s,
                reap=lambda: [child.alive for child in children],
            )
        finally:
            for child in children:
                child.wait(self._grace_s)
                self._tell_guard(f"-{child.pid}")
                self.children.remove(child)
                shutil.rmtree(child.temp, ignore_errors=True)

    def _tell_guard(self, line: str) -> None:
        with suppress(BrokenPipeError):  # the guard was killed; the block still ends the children
            self._guard_input.write(f"{line}\n".encode())
            self._guard_input.flush()


@contextmanager
def open_fleet(log_dir: Path, *, grace_s: float = 10.0) -> Generator[ProcessGroup]:
    """Yield a group of children that end with the block, or with this process if it is killed.

    Logs go to `log_dir`, which is created; only this user can read them. Children get `grace_s`
    seconds to end before they are killed.
    """
    make_directory(log_dir)
    usual = tempfile.gettempdir()
    parent = usual if len(usual.encode()) <= LONGEST_TEMP else "/tmp"
    with (
        tempfile.TemporaryDirectory(
            prefix="pdrelay-", dir=parent, ignore_cleanup_errors=True
        ) as temp,
        _guard(Path(temp)) as guard_input,
    ):
        fleet = ProcessGroup(log_dir, Path(temp), guard_input, grace_s=grace_s)
        try:
            yield fleet
        finally:
            fleet.stop(*fleet.children)


@contextmanager
def _guard(temp: Path) -> Generator[IO[bytes]]:
    command = [sys.executable, "-P", "-m", guard.__name__, str(temp)]
    # Its own session: what kills our group does not reach it.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
    ) as process:
        if process.stdin is None:
            raise RuntimeError("Popen with stdin=PIPE has no stdin")
        yield process.stdin


def _serves(client: httpx.Client, child: Child) -> bool:
    try:
        return client.get(child.command.health_url).is_success
    except httpx.TransportError:
        return False


def make_directory(path: Path) -> None:
    """Make a directory, and its missing parents, for this user alone."""
    for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        missing.mkdir(mode=DIRECTORY, exist_ok=True)


def open_file(path: Path, *, append: bool) -> IO[bytes]:
    """Open a file to write to, for this user alone also if it was there before."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
    file = os.fdopen(os.open(path, flags, FILE), "ab" if append else "wb")
    os.fchmod(file.fileno(), FILE)
    return file
