"""What can go wrong on one machine: every :class:`LocalError` is one sentence for the person at the terminal."""

from pathlib import Path


class LocalError(Exception):
    """The machine lacks something, the model's directory holds something else, or the first request failed."""


class ChildDied(LocalError):
    """A child process ended by itself."""

    def __init__(self, name: str, exit_code: int, log: Path, tail: str, cause: str | None) -> None:
        because = f", probably because of {cause}" if cause else ""
        signalled = f"was ended by signal {-exit_code}"  # as `subprocess` reports it: a negative code is a signal
        ending = signalled if exit_code < 0 else f"ended with exit code {exit_code}"
        super().__init__(f"{name} {ending}{because}; its log is {log}")
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
