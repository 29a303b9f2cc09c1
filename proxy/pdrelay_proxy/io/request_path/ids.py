"""The random names that the router gives: to requests, which clients see, and to transfers, which
only engines see.
"""

import os
from typing import Final, cast

from pdrelay_proxy.core.model import RequestId, TransferId

# bytes that the operating system is asked for at once: a call for each name costs six times as much
_SLICE: Final = 4096
_DIGITS: Final = 32  # of a name: 128 bits
_IDS: Final[list[RequestId]] = []  # nobody has seen these yet
_TRANSFERS: Final[list[TransferId]] = []


def _forget() -> None:
    _IDS.clear()
    _TRANSFERS.clear()


os.register_at_fork(after_in_child=_forget)  # or two processes would give the same names


def new_id() -> RequestId:
    """Return a name that no other request has, and that cannot be computed from those of others."""
    while True:
        try:
            return _IDS.pop()  # one step of the interpreter: two threads never get the same
        except IndexError:
            _IDS.extend(cast("list[RequestId]", _names("pdrelay-")))


def new_transfer() -> TransferId:
    """Return a name for a transfer that tells nothing of its request, nor the request's of it.

    In push a decode engine gets the blocks of the transfer that it can name, so clients must not
    see this.
    """
    while True:
        try:
            return _TRANSFERS.pop()
        except IndexError:
            _TRANSFERS.extend(cast("list[TransferId]", _names("xfer-")))


def _names(prefix: str) -> list[str]:
    """Return some names: a prefix and 32 hexadecimal digits."""
    digits = os.urandom(_SLICE).hex()
    return [prefix + digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)]
