"""Errors of ``pdrelay up``: each message is one sentence for the person at the terminal."""

from pathlib import Path


class LocalError(Exception):
    """The machine lacks something, the model's folder is not a model's, or a request failed."""


class ChildFailed(LocalError):
    """A child process ended by itself, or runs and does not serve; ``tail``: the end of its log."""

    def __init__(self, message: str, log: Path, tail: str) -> None:
        super().__init__(f"{message}; its log is {log}")
        self.log = log
        self.tail = tail
