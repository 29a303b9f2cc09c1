"""Which of several workers this process is, and its line to the supervisor: it ends when the supervisor does."""

import fcntl
import os
import select
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

VARIABLE: Final = "PDRELAY_WORKER"  # set by the supervisor, for its workers alone
# What is said on the line.
READY: Final = b"R"  # by the supervisor: a worker may begin; by a worker: it serves
END: Final = b"E"  # by the supervisor: take no more, and finish what there is
HURRY: Final = b"H"  # by the supervisor: end at once


class WorkerContext(msgspec.Struct, frozen=True):
    """One worker among the others."""

    number: int  # 0 to of - 1
    of: int
    folder: str  # what the workers of this router share; nobody else may look into it
    port: int  # the one they all listen on
    line: int  # file descriptor of a socket: READY comes in, then READY goes out, and its end comes in
    starts: int  # workers of this number so far, this one included
    admin_port: int | None = None  # that of probes and operators, which they all listen on, too; None: the same

    @property
    def path(self) -> Path:
        """Return the folder."""
        return Path(self.folder)

    def may_begin(self) -> bool:
        """Wait for the word of the supervisor; False: it has none any more."""
        select.select([self.line], [], [])
        return os.read(self.line, 1) == READY

    def peers(self) -> tuple[int, ...]:
        """Return the numbers of the others."""
        return tuple(number for number in range(self.of) if number != self.number)

    @contextmanager
    def kept(self) -> Generator[None]:
        """Keep the folder while the block lasts; the last of those whose supervisor has gone removes it."""
        with (self.path / "alive").open("a") as alive:
            fcntl.flock(alive, fcntl.LOCK_SH)
            yield
            if heard(self.line) is not None:
                return
            try:
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            shutil.rmtree(self.path, ignore_errors=True)  # nobody is left who could be told that it did not work


def own_place() -> WorkerContext | None:
    """Return this process's place; None: it is no worker of several. What it starts itself is none either."""
    text = os.environ.pop(VARIABLE, None)
    return None if text is None else msgspec.json.decode(text, type=WorkerContext)


def heard(line: int) -> bytes | None:
    """Return what the supervisor has said since; None: it has ended."""
    try:
        return os.read(line, 64) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None
