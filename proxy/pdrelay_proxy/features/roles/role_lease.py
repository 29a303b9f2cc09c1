"""Which router decides on roles, and when engines began to turn: one short text that all routers
share.

A lease as in Kubernetes' leader election: who holds it writes it anew again and again, and another
router takes it when it has not changed for as long as it lasts, by that router's own clock, so that
clocks need not agree. Each write replaces the text that was read, or fails. There is no consensus:
a holder that hangs may believe for a moment that it still holds the lease, so a turn is written
down before it is made, and that write fails then.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

import msgspec

LASTS_S: Final = 20.0
_RENEWED_S: Final = 5.0  # after which the holder writes it anew
_HOUR_S: Final = 3600.0
_MOST_TURNS: Final = 1000  # that are remembered
_MOST_BYTES: Final = 64 * 1024


class _LeaseRecord(msgspec.Struct, forbid_unknown_fields=False):
    holder: str
    number: int  # rises with each write
    turned_at: tuple[float, ...] = ()  # seconds since 1970, by the clock of the holder of then


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What a router makes of the text. Times are seconds since 1970."""

    holds: bool
    holder: str  # empty: nobody
    turned_at: tuple[float, ...]
    text: str | None  # to be written in place of what was read; None: nothing


@dataclass(frozen=True, slots=True)
class RoleHold:
    """What the controller needs of it."""

    holds: bool
    holder: str = ""  # empty: nobody
    turned_at: tuple[float, ...] = ()  # seconds of the router's own clock
    trouble: str = ""  # why it is not known who holds it


class RoleLease:
    """One router's side.

    ``now`` is seconds of a clock that only rises, ``wall`` seconds since 1970.
    """

    def __init__(self, me: str) -> None:
        """``me``: no other process has this name, also after a restart."""
        self._me = me
        # the text that another one wrote last, and when it was new
        self._seen: tuple[str, float] | None = None
        self._renewed = float("-inf")
        # as this one has written them last: a store may lose its memory
        self._turned_at: tuple[float, ...] = ()

    def look(
        self, text: str, *, now: float, wall: float, turns: bool = False, counts: bool = True
    ) -> LeaseView:
        """Take in the text as it is.

        ``turns``: an engine shall turn, and this one must still hold the lease when it does, so the
        text is written anew; ``counts``: the turn is one of those that are written down.
        """
        record = _read(text)
        # A turn of the future is one of now: its router's clock is ahead. The holder's next renewal
        # writes that down. Several of those may have the same time from then on, and are several.
        known = Counter(record.turned_at) | Counter(self._turned_at)
        turned_at = tuple(
            sorted([min(at, wall) for at in known.elements() if wall - _HOUR_S < at])
        )[-_MOST_TURNS:]
        if record.holder not in ("", self._me) and not self._is_over(text, now):
            return LeaseView(holds=False, holder=record.holder, turned_at=turned_at, text=None)
        if turns:
            turned_at = (*turned_at, wall) if counts else turned_at
        elif record.holder == self._me and now < self._renewed + _RENEWED_S:
            return LeaseView(holds=True, holder=self._me, turned_at=turned_at, text=None)
        text = msgspec.json.encode(_LeaseRecord(self._me, record.number + 1, turned_at)).decode()
        return LeaseView(holds=True, holder=self._me, turned_at=turned_at, text=text)

    def written(self, view: LeaseView, *, now: float) -> None:
        """Note that the text of a view was written."""
        self._renewed = now
        self._turned_at = view.turned_at

    def _is_over(self, text: str, now: float) -> bool:
        if self._seen is None or self._seen[0] != text:
            self._seen = text, now
        return now >= self._seen[1] + LASTS_S


def _read(text: str) -> _LeaseRecord:
    """Read a text; what is none of ours counts as no lease at all: it is replaced."""
    try:
        return msgspec.json.decode(text[:_MOST_BYTES], type=_LeaseRecord)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeError):
        return _LeaseRecord("", 0)
