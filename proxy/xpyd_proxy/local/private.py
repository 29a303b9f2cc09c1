"""Files for this user alone: logs have prompts and addresses in them, and a machine may have other users."""

import os
from pathlib import Path
from typing import IO

DIRECTORY, FILE = 0o700, 0o600


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing, for this user alone; one that is there stays as it is."""
    for missing in reversed([one for one in (path, *path.parents) if not one.exists()]):
        missing.mkdir(mode=DIRECTORY, exist_ok=True)


def open_file(path: Path, *, append: bool) -> IO[bytes]:
    """Open a file to write to, for this user alone also if it was there before."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
    file = os.fdopen(os.open(path, flags, FILE), "ab" if append else "wb")
    os.fchmod(file.fileno(), FILE)
    return file
