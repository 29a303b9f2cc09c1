"""A file system of 64 KiB that can be full, or read-only, and is gone after the test."""

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

_SIZE: Final = "64k"
HOW: Final = ("full", "read-only")
WORDS: Final = {"full": "No space left on device", "read-only": "Read-only file system"}


class SmallDisk:
    """What is mounted at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, how: str) -> None:
        """Have it take nothing more."""
        if how == "full":
            with (self.path / "filler").open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(1024)):
                        pass
                except OSError:
                    return
        _run("mount", "-o", "remount,ro", str(self.path))

    def mend(self, how: str) -> None:
        """Have it take more again."""
        if how == "full":
            (self.path / "filler").unlink()
        else:
            _run("mount", "-o", "remount,rw", str(self.path))


@contextmanager
def small_disk(folder: Path) -> Generator[SmallDisk]:
    """Mount one below a folder while the block lasts; skip the test where that is not allowed."""
    path = folder / "disk"
    path.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(path))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a file system of 64 KiB cannot be mounted here: that takes root and CAP_SYS_ADMIN")
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "-l", str(path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
