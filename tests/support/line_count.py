"""What a call costs, whatever machine runs it and whatever else that does: the lines of Python that run."""

import sys


def lines(call):
    """Return how many lines a call runs, those of comprehensions included, once for each turn of theirs."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
