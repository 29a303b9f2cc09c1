"""Long work in steps, so that other tasks run in between."""

from collections.abc import Generator, Iterator, Sequence
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


def portions(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut a sequence into parts of so many items; of an empty one there is none."""
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
