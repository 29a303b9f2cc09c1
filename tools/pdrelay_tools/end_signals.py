"""SIGTERM and SIGHUP, which end a command with its cleanups."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_end_signals(handle: Callable[[int, FrameType | None], object]) -> Generator[None]:
    """Call this on both signals while the block lasts; an ignored one stays ignored (nohup)."""
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
