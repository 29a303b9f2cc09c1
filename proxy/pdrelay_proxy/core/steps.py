"""Long work in steps, so that other tasks run in between."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def finish(steps: Generator[None, None, T]) -> T:
    """Run all steps at once, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
