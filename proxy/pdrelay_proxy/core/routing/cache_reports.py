"""What engines tell of their own prefix caches: the place of a feature that hears of it."""

from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.model import RoutingHints


class CacheReport:
    """What one engine has of a prompt, as it tells itself. It does not change."""

    __slots__ = ("most", "size", "source")

    def __init__(self, size: int, most: int, source: str) -> None:
        self.size = size  # bytes of the prompt that it has for certain
        self.most = most  # with what it was sent it may have as many
        self.source = source  # how that is known, for operators


class CacheReports:
    """Says what engines have of prompts. Without such a feature all is a guess, by what they were sent.

    No call may wait or raise. A class, because a compiled call of a Protocol is slow.
    """

    @property
    def changes(self) -> int:
        """How often something changed: what was reported stays true while this is the same."""
        return 0

    def report(self, engine: Member, hints: RoutingHints, /) -> CacheReport | None:
        """Return what an engine has of a prompt; None: what it was sent decides."""
        del engine, hints
        return None

    def tokens(self, engine: Member, hints: RoutingHints, /) -> int | None:
        """Return how many tokens of the prompt an engine has for certain; None: it or they are not known."""
        del engine, hints
        return None

    def sent(self, hints: RoutingHints, /) -> None:
        """A request with this prompt goes to an engine."""
