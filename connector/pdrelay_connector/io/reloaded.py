"""Files that an operator may replace while the engine runs: secrets and certificates."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from pdrelay_connector.errors import SettingsError

logger = logging.getLogger("vllm.pdrelay")

# s between two looks at the dates of files: not every connection costs system calls
LOOK_AGAIN = 1.0
ValueT = TypeVar("ValueT")


class ReloadedFiles(Generic[ValueT]):
    """What ``load`` has made of some files; made again when one of them has changed.

    Files that have become unusable change nothing. Kubernetes replaces mounted files by renaming a
    link to their folder.
    """

    def __init__(self, what: str, paths: Sequence[str], load: Callable[[], ValueT]) -> None:
        """``what`` is for the log. Raises what ``load`` does, which is ``SettingsError``."""
        self._what = what
        self._paths = paths
        self._load = load
        # before they are read: what changes meanwhile is read again
        self._last_identities: Sequence[object] = self._identities()
        self._look_at = time.monotonic() + LOOK_AGAIN
        self._value = load()

    def __call__(self) -> ValueT:
        """Return what is in force. Any thread may call it."""
        if self._has_changed():
            try:
                self._value = self._load()
            except SettingsError as exc:
                logger.warning("pdrelay: the %s in force stay: %s", self._what, exc)
            else:
                logger.info("pdrelay: the %s have changed", self._what)
        return self._value

    def _has_changed(self) -> bool:
        """Whether a file has another inode, size or date of change than when it was read."""
        if not self._paths or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_AGAIN
        before = self._last_identities
        self._last_identities = self._identities()
        return self._last_identities != before

    def _identities(self) -> Sequence[object]:
        return [_identity(path) for path in self._paths]


def _identity(path: str) -> object:
    try:
        stat = Path(path).stat()
    except OSError as exc:
        return exc.errno
    # a new owner or mode, too: what could not be read may be readable now
    return stat.st_ino, stat.st_size, stat.st_ctime_ns
