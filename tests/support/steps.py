"""How much a generator does between two of its values, counted in calls of functions: no clock, so no busy machine."""

import sys
from collections.abc import Iterator


def work_of_steps(steps: Iterator[object]) -> list[int]:
    """Run a generator to its end; return the number of calls, of Python's functions and of C's, in each step."""
    found = list[int]()
    count = 0

    def count_call(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    while True:
        count = 0
        before = sys.getprofile()
        sys.setprofile(count_call)
        try:
            next(steps)
        except StopIteration:
            return found
        finally:
            sys.setprofile(before)
            found.append(count)
