"""The lease of the router that decides on roles, and the recent role changes: one shared text.

It works as Kubernetes' leader election (client-go, tools/leaderelection): the holder renews it
again and again, and another router takes it if it has not changed for LASTS_S by that router's own
clock, so that clocks need not agree. Each write replaces the text that was read, or fails. It is no
consensus: a router that hung may believe for a moment that it still holds the lease. So a role
change is written down before it begins, and that write fails then.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

LASTS_S: Final = 20.0
_RENEWED_S: Final = 5.0  # between two renewals
_HOUR_S: Final = 3600.0
_MOST_TURNS: Final = 1000  # role changes that are remembered
_MOST_BYTES: Final = 64 * 1024
_MOST_NAME: Final = 300  # characters: a host's name has 64, and it is logged and shown
_MOST_NUMBER: Final = 2**53


class _LeaseRecord(msgspec.Struct, forbid_unknown_fields=False):
    holder: Annotated[str, msgspec.Meta(max_length=_MOST_NAME)]
    # rises with each write
    number: Annotated[int, msgspec.Meta(ge=0, le=_MOST_NUMBER)]
    turned_at: tuple[float, ...] = ()  # role changes: seconds since 1970 by their holder's clock


@dataclass(frozen=True, slots=True)
class LeaseView:
    """The text as one router reads it. Times are seconds since 1970."""

    holds: bool  # this router holds the lease
    holder: str  # empty: no router
    changed_at: tuple[float, ...]
    text: str | None  # the new text to write; None: none


@dataclass(frozen=True, slots=True)
class RoleHold:
    """The lease as the controller needs it."""

    holds: bool  # this router holds the lease
    holder: str = ""  # empty: no router
    changed_at: tuple[float, ...] = ()  # seconds of the router's own clock
    trouble: str = ""  # why the holder is not known


class RoleLease:
    """One router's side.

    ``now`` is seconds of a clock that only rises, ``wall`` seconds since 1970.
    """

    def __init__(self, me: str) -> None:
        """``me``: a name that no other process has, also after a restart."""
        self._me = me
        # the latest text of another router, and when it was first read
        self._foreign_text: tuple[str, float] | None = None
        self._renewed = float("-inf")
        # as this router wrote them last: a store may lose them
        self._changed_at: tuple[float, ...] = ()

    def view_of(
        self, text: str, *, now: float, wall: float, turns: bool = False, counts: bool = True
    ) -> LeaseView:
        """Return the view of the present text.

        ``turns``: a role change is to begin, so the text must be written anew, which proves that
        this router still holds the lease; ``counts``: the change is recorded.
        """
        record = _read(text)
        # A change in the future counts as one of now: its router's clock is ahead. The holder's
        # next renewal writes that down. Then several changes may have the same time: all count.
        changes = Counter(record.turned_at) | Counter(self._changed_at)
        changed_at = tuple(
            sorted([min(at, wall) for at in changes.elements() if wall - _HOUR_S < at])
        )[-_MOST_TURNS:]
        if record.holder not in ("", self._me) and not self._is_over(text, now):
            return LeaseView(holds=False, holder=record.holder, changed_at=changed_at, text=None)
        if turns:
            changed_at = (*changed_at, wall) if counts else changed_at
        elif record.holder == self._me and now < self._renewed + _RENEWED_S:
            return LeaseView(holds=True, holder=self._me, changed_at=changed_at, text=None)
        text = msgspec.json.encode(_LeaseRecord(self._me, record.number + 1, changed_at)).decode()
        return LeaseView(holds=True, holder=self._me, changed_at=changed_at, text=text)

    def written(self, view: LeaseView, *, now: float) -> None:
        """Note that the text of a view was written."""
        self._renewed = now
        self._changed_at = view.changed_at

    def _is_over(self, text: str, now: float) -> bool:
        if self._foreign_text is None or self._foreign_text[0] != text:
            self._foreign_text = text, now
        return now >= self._foreign_text[1] + LASTS_S


def _read(text: str) -> _LeaseRecord:
    """Parse a text; an invalid one counts as no lease, and is replaced."""
    try:
        return msgspec.json.decode(text[:_MOST_BYTES], type=_LeaseRecord)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeError):
        return _LeaseRecord("", 0)
