"""The signals that end a command, with its cleanups."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_end_signals(
    handle: Callable[[int, FrameType | None], object],
    *numbers: signal.Signals,
) -> Generator[None]:
    """Call this on these signals while the block lasts; an ignored one stays ignored (nohup)."""
    usual = {
        number: handler
        for number in numbers
        if (handler := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler)
    }
    for number in usual:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
