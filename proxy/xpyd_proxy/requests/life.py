"""Where one request is in its life, and what all of its parts share.

requests/request.py puts the parts together: the client's response, the dispatch to engines, an array of prompts.
"""

from typing import TYPE_CHECKING, Final

from xpyd_proxy.core.request_record import RequestRecord
from xpyd_proxy.requests.lifecycle import TRANSITIONS, RequestEvent, RequestState
from xpyd_proxy.requests.stepper import Stepper

if TYPE_CHECKING:
    from xpyd_proxy.requests.service import Requests, RequestSpan

_RECEIVED: Final = RequestState.RECEIVED  # looking a member up takes as long as a call


class RequestLife:
    """The life of one request."""

    __slots__ = ("of", "record", "span", "started_at", "state", "steps")

    def __init__(self, of: "Requests", record: RequestRecord, span: "RequestSpan | None") -> None:
        self.state = _RECEIVED
        self.of = of
        self.record = record
        self.span = span
        self.steps = Stepper()
        self.started_at = of.clock()  # seconds

    def on(self, event: RequestEvent) -> None:
        """Take a step of the table (requests/lifecycle.py); a step that is not in it is a bug, and raises KeyError."""
        self.state = TRANSITIONS[self.state][event]

    def elapsed_s(self) -> float:
        """Return the seconds since the request's head came."""
        return self.of.clock() - self.started_at
