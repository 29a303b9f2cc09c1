"""What engines tell of their own prefix caches: the place of a feature that hears of it.

Classes, because a compiled call of a Protocol is slow. No call may wait or raise.
"""

from typing import TypeAlias

from pdrelay_proxy.core.fleet.health import ChangeCount
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.model import RoutingHints

# Bytes of the prompt that an engine has for certain; how many it may have with what it was sent;
# how that is known, for operators. A tuple: it is made for each engine of each request.
CacheReport: TypeAlias = tuple[int, int, str]


class PromptReports:
    """What engines have of one prompt, while nothing changes."""

    __slots__ = ()

    def report(self, engine: Member, /) -> CacheReport | None:
        """Return what an engine has; None: what it was sent decides."""
        del engine
        return None

    def tokens(self, engine: Member, /) -> int | None:
        """Return how many tokens an engine has for certain; None: it or they are not known."""
        del engine
        return None

    def sent(self, now: float, /) -> None:
        """A request with this prompt goes to an engine."""


class CacheReports:
    """Says what engines have of prompts.

    Without such a feature all is a guess, by what they were sent.
    """

    def __init__(self, changes: ChangeCount) -> None:
        self.changes = changes  # what was reported stays true while its count is the same

    def of(self, hints: RoutingHints, /) -> PromptReports | None:
        """Return what engines have of a prompt; None: what they were sent decides."""
        del hints
        return None
