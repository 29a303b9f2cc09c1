"""A lock beside a file that several processes of one machine change."""

import fcntl
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pdrelay_proxy.io.discovery.store import StoreNotWritten

LOCK_WAIT_S: Final = 5.0  # a change takes milliseconds
PATIENCE_S: Final = LOCK_WAIT_S + 3.0  # an operator waits; a file system may hang for ever
_POLL_S: Final = 0.01


@contextmanager
def locked(path: Path, wait_s: float) -> Generator[None]:
    """Hold the lock of a file while the block lasts; this blocks its thread, so it is called in a
    thread of its own.

    Raises StoreNotWritten: another process has held it for ``wait_s`` seconds.
    """
    name = f"{path}.lock"
    until = time.monotonic() + wait_s
    with Path(name).open("a") as lock:
        while not _acquire(lock.fileno()):
            if time.monotonic() >= until:
                raise StoreNotWritten(
                    f"{path} was not changed: another process has held its lock {name} for "
                    f"{wait_s:g} s, such as a "
                    f"router of this store that is stopped or hangs: `fuser {name}` names it"
                )
            time.sleep(_POLL_S)
        yield


def _acquire(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
