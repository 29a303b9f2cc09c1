"""Ctrl-C while modules are loaded: the command ends without output."""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

INTERRUPTED: Final = 130  # exit code, as shells have it for Ctrl-C


@contextmanager
def ctrl_c_ends_at_once() -> Generator[None]:
    """End at once on Ctrl-C: modules that are being loaded would print tracebacks."""
    # the parent process has Ctrl-C ignored
    is_ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if is_ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)
