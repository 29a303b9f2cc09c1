"""The random names that the router gives: to requests, which clients see, and to transfers, which only engines see."""

import os
from typing import Final

from xpyd_proxy.core.model import RequestId, TransferId

_SLICE: Final = (
    4096  # bytes that the operating system is asked for at once: a call for each name costs six times as much
)
_DIGITS: Final = 32  # of a name: 128 bits
_READY: Final[list[str]] = []  # nobody has seen these yet
os.register_at_fork(after_in_child=_READY.clear)  # or two processes would give the same names


def new_id() -> RequestId:
    """Return a name that no other request has, and that cannot be computed from those of others."""
    return RequestId("xpyd-" + _random())


def new_transfer() -> TransferId:
    """Return a name for a transfer that tells nothing of its request, nor the request's of it.

    In push a decode engine gets the blocks of the transfer that it can name, so clients must not see this.
    """
    return TransferId("xfer-" + _random())


def _random() -> str:
    """Return 32 hexadecimal digits."""
    while True:
        try:
            return _READY.pop()  # one step of the interpreter: two threads never get the same
        except IndexError:
            digits = os.urandom(_SLICE).hex()
            _READY.extend([digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)])
