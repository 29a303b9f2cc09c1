"""The roster of all workers, in one file that only grows; the kernel's lock says whose turn it is to write."""

import fcntl
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from xpyd_proxy.core.model import InstanceId
from xpyd_proxy.core.workers.instance_ids import InstanceIds, Line, Verb


class InstanceIdLog:
    """One worker's hand on it. A line is some hundred bytes, and a turn some microseconds: nothing waits for a disk."""

    def __init__(self, path: Path) -> None:
        self.roster = InstanceIds()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._read_to = 0
        self._news: list[Line] = []  # what others have written, and nobody has asked for yet

    def number(self, key: str, *, anew: bool) -> int:
        """Return the number of an engine in all workers; ``anew``: one that was taken out by hand gets another."""
        return self.named(key, anew=anew)[0]

    def named(self, key: str, *, anew: bool) -> tuple[int, bool]:
        """Return the same, and whether no worker had given it one before."""
        with self._turn():
            is_new = self.roster.number(key) is None or (anew and self.roster.is_removed(key))
            if is_new:
                self._write(Verb.NAME, key)
        number = self.roster.number(key)
        assert number is not None
        return number, is_new

    def say(self, verb: Verb, text: str) -> None:
        """Let all workers know; ``text``: as it stands in the line of this verb."""
        with self._turn():
            self._write(verb, text)

    def news(self) -> Sequence[Line]:
        """Return what other workers have named and ordered since the last time."""
        if os.fstat(self._file).st_size > self._read_to:
            with self._turn():
                pass
        found, self._news = self._news, []
        return found

    def catch_up(self, name: InstanceId) -> None:
        """Drop the news of an engine: what the roster says of it is known."""
        self._news = [line for line in self._news if line[0] is Verb.NAME or line[1].partition(" ")[0] != name]

    @contextmanager
    def _turn(self) -> Generator[None]:
        """Have the file alone, with all that others have written read."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._read()
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self) -> None:
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, size - self._read_to, self._read_to)
        self._read_to += len(data)
        for text in data.splitlines():
            line = msgspec.json.decode(text, type=Line)
            self.roster.apply(line)
            if line[0] is not Verb.CLOSE:
                self._news.append(line)

    def _write(self, verb: Verb, text: str) -> None:
        line: Line = (verb, text)
        self._read_to += os.write(self._file, msgspec.json.encode(line) + b"\n")
        self.roster.apply(line)
