"""The roster of all workers, in one file that only grows; the kernel's lock says whose turn it is to write.

Only who writes takes the lock, and for microseconds. A worker that is stopped meanwhile, by SIGSTOP or a debugger,
keeps it: the others go on without, write their orders when they can, and add no engine that none has named yet.
"""

import fcntl
import logging
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.workers.instance_ids import InstanceIds, Line, Verb
from pdrelay_proxy.errors import IdLogBusy

logger = logging.getLogger(__name__)
_START_WAIT_S: Final = 5.0  # for a turn, while nothing is served yet
_SERVING_WAIT_S: Final = 0.004  # likewise on the loop that serves requests; once, if it is in vain
_POLL_S: Final = 0.0002


class InstanceIdLog:
    """One worker's hand on it. A line is some hundred bytes, and a turn some microseconds: nothing waits for a disk."""

    def __init__(self, path: Path) -> None:
        self.roster = InstanceIds()
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._read_to = 0
        self._news: list[Line] = []  # what others have written, and nobody has asked for yet
        self._unsaid: list[Line] = []  # of this worker, while another one has the turn
        self._is_held = False  # a turn was waited for in vain: until there is one, none is waited for
        self._is_late = False  # the log says that lines are left to say

    def number(self, key: str, *, anew: bool) -> int:
        """Return the number of an engine in all workers; ``anew``: one that was taken out by hand gets another."""
        return self.named(key, anew=anew)[0]

    def named(self, key: str, *, anew: bool) -> tuple[int, bool]:
        """Return the same, and whether no worker had given it one before.

        ``anew`` is said while requests are served. Raises IdLogBusy: it has none, and none can be written now.
        """
        self._read()
        is_new = self._is_new(key, anew=anew)
        if is_new:
            with self._turn(_SERVING_WAIT_S if anew else _START_WAIT_S):
                is_new = self._is_new(key, anew=anew)  # another one may have been faster
                if is_new:
                    self._write((Verb.NAME, key))
        number = self.roster.number(key)
        assert number is not None
        return number, is_new

    def say(self, verb: Verb, text: str) -> None:
        """Let all workers know, at once or as soon as it can be written; ``text``: as it stands in the verb's line."""
        self._unsaid.append((verb, text))
        self._say_rest()

    def news(self) -> Sequence[Line]:
        """Return what other workers have named and ordered since the last time."""
        self._say_rest()
        self._read()
        found, self._news = self._news, []
        return found

    def catch_up(self, name: InstanceId) -> None:
        """Drop the news of an engine: what the roster says of it is known."""
        self._news = [line for line in self._news if line[0] is Verb.NAME or line[1].partition(" ")[0] != name]

    def _is_new(self, key: str, *, anew: bool) -> bool:
        name = self.roster.name(key)
        if name is None or (anew and self.roster.is_removed(key)):
            return True
        # Under the id of before, it would be ended by what is left to say of that one.
        return (Verb.CLOSE, name) in self._unsaid or (anew and (Verb.REMOVE, name) in self._unsaid)

    def _say_rest(self) -> None:
        if not self._unsaid:
            return
        try:
            with self._turn(_SERVING_WAIT_S):
                pass
        except IdLogBusy as exc:  # the next turn has it
            if not self._is_late:
                self._is_late = True
                logger.warning("%s: the other workers hear later what is done here", exc)
        else:
            self._is_late = False

    @contextmanager
    def _turn(self, wait_s: float) -> Generator[None]:
        """Have the file alone, with all that others have written read, and written what was left to say.

        Raises IdLogBusy: another worker has it for so long, or there is no room in it.
        """
        until = time.monotonic() + (0.0 if self._is_held else wait_s)
        while not self._is_taken():
            if time.monotonic() >= until:
                self._is_held = True
                said = f"another worker of this router holds {self._path} for {wait_s:g} s: it is stopped, or hangs"
                raise IdLogBusy(said)
            time.sleep(_POLL_S)
        self._is_held = False
        try:
            self._read()
            if os.fstat(self._file).st_size > self._read_to:  # half a line: its worker was killed, or had no room
                self._append(b"\n")
                self._read()
            while self._unsaid:
                self._write(self._unsaid[0])
                del self._unsaid[0]
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _is_taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _read(self) -> None:
        """Read all lines that are whole: another worker may be writing one."""
        size = os.fstat(self._file).st_size
        if size <= self._read_to:
            return
        data = os.pread(self._file, size - self._read_to, self._read_to)
        whole = data[: data.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for text in whole.splitlines():
            try:
                line = msgspec.json.decode(text, type=Line)
            except msgspec.DecodeError:
                logger.warning("%s has half a line of a worker that could not write the rest: %r", self._path, text)
                continue
            self.roster.apply(line)
            if line[0] is not Verb.CLOSE:
                self._news.append(line)

    def _write(self, line: Line) -> None:
        text = msgspec.json.encode(line) + b"\n"
        self._append(text)
        self._read_to += len(text)
        self.roster.apply(line)

    def _append(self, text: bytes) -> None:
        try:
            is_whole = os.write(self._file, text) == len(text)
        except OSError as exc:
            raise IdLogBusy(f"{self._path} cannot be written: {exc.strerror}") from exc
        if not is_whole:
            raise IdLogBusy(f"{self._path} cannot be written: there is no room for a line")
