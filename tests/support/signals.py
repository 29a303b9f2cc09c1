"""Signals of the process that runs the tests, which may ignore some: `nohup pytest &`."""

import signal
from contextlib import contextmanager


@contextmanager
def handling(handlers):
    """Handle these signals so in the block, and after it as before."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
