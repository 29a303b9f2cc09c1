"""UCX's own log of the protocols that it chooses: set before NIXL loads it, read while it runs."""

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Final

from pdrelay_connector.core.doctor.ucx_log import transports_in

PROTOCOLS = "UCX_PROTO_INFO"
LOG_FILE = "UCX_LOG_FILE"
NIXL_LEVEL = "NIXL_LOG_LEVEL"
MOST_READ: Final = 4 << 20  # bytes of the log that are looked at


class UcxLog:
    """The log of this process.

    ``path`` is absent where the operator has set UCX_LOG_FILE: it is theirs.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def transports(self) -> tuple[str, ...]:
        """Return what UCX has used so far."""
        if self._path is None:
            return ()
        ctypes.CDLL(None).fflush(None)  # UCX writes through C's streams, which keep the last 4 KiB
        try:
            with self._path.open("rb") as file:
                return transports_in(file.read(MOST_READ).decode(errors="replace"))
        except OSError:
            return ()


@contextlib.contextmanager
def ucx_log() -> Generator[UcxLog]:
    """Have UCX log its protocols to a file of ours, which is removed at the end.

    NIXL loads UCX later.
    """
    # it would write lines of its own between those of the report
    os.environ.setdefault(NIXL_LEVEL, "WARN")
    if LOG_FILE in os.environ:
        yield UcxLog(None)
        return
    with tempfile.TemporaryDirectory(prefix="pdrelay-doctor-") as folder:
        path = Path(folder, "ucx.log")
        os.environ[LOG_FILE] = str(path)
        os.environ[PROTOCOLS] = "y"
        yield UcxLog(path)
