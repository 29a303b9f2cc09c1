"""Files that an operator may replace while the engine runs: secrets and certificates."""

import time
from collections.abc import Sequence
from pathlib import Path

LOOK_AGAIN = 1.0  # s between two looks at the dates of files: not every connection costs system calls


class Watched:
    """Tells when one of some files has changed.

    Kubernetes replaces mounted files by renaming a link to their folder.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._seen: Sequence[object] = self._look()
        self._look_at = time.monotonic() + LOOK_AGAIN

    def changed(self) -> bool:
        """Whether a file has another date, size or inode than at the last call that returned true."""
        if not self._paths or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_AGAIN
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        return True

    def _look(self) -> Sequence[object]:
        return [_identity(path) for path in self._paths]


def _identity(path: str) -> object:
    try:
        stat = Path(path).stat()
    except OSError as exc:
        return exc.errno
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
