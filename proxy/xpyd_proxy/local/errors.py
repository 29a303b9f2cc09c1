"""What can go wrong on one machine: every :class:`LocalError` is one sentence for the person at the terminal.

LocalError
├── PreflightFailed   the machine lacks something; nothing was started
├── ModelDirectoryTaken   the model directory holds something else
├── ChildDied         a process ended although it should have gone on
├── NotReady          a process is still not serving after the time it was given
└── NoAnswer          everything runs, but the first request failed
"""

from pathlib import Path


class LocalError(Exception):
    """The root: its text is a whole sentence that says what to do."""


class PreflightFailed(LocalError):
    """The machine lacks something that the engines need."""


class ModelDirectoryTaken(LocalError):
    """The directory for the model holds files that are not a model of ours."""


class NoAnswer(LocalError):
    """The first request through the router failed."""


class ChildDied(LocalError):
    """A child process ended by itself."""

    def __init__(self, name: str, exit_code: int, log: Path, tail: str, cause: str | None) -> None:
        because = f", probably because of {cause}" if cause else ""
        super().__init__(f"{name} {ending(exit_code)}{because}; its log is {log}")
        self.name = name
        self.exit_code = exit_code
        self.log = log
        self.tail = tail


class NotReady(LocalError):
    """A child process runs but does not serve."""

    def __init__(self, name: str, seconds: float, log: Path, tail: str) -> None:
        super().__init__(f"{name} is not ready after {seconds:.0f} s; its log is {log}")
        self.name = name
        self.log = log
        self.tail = tail


def ending(exit_code: int) -> str:
    """Say how a process ended, from the way `subprocess` reports it: a negative code is a signal."""
    return f"was ended by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
