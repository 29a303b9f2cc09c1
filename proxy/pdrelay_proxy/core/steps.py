"""Long work that is done in steps, so that others may have their turn in between."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def finish(steps: Generator[None, None, T]) -> T:
    """Do all steps at once, and return what they lead to."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
