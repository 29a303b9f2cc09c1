"""Requests that a feature answers by requests of its own, in place of their dispatch to two
engines.

A feature names such a request once its body is read (``CallClaims``). It says what the request is
charged at the gate, and answers it once that has let it in (``Claim``). Each part is served as any
other request is (``PartRequest``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from pdrelay_proxy.core.admission.ticket import Ticket
from pdrelay_proxy.core.model import GenerationRequest
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.core.routing.claimed_call import ClaimedCall
from pdrelay_proxy.requests.answering import Answering
from pdrelay_proxy.requests.client_response import ClientResponse
from pdrelay_proxy.requests.intake import RequestPlan
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.requests.response import ResponseWriter


class PartRequest(Answering):
    """One request of several that serve another one together (requests/request.py)."""

    __slots__ = ()

    @property
    @abstractmethod
    def record(self) -> RequestRecord:
        """Return what has happened to it."""

    @property
    @abstractmethod
    def failure(self) -> Exception | None:
        """Return the error that its client got; None: it got none."""

    @abstractmethod
    def serve(self) -> None:
        """Serve it."""

    @abstractmethod
    def interrupt(self, error: Exception, /) -> None:
        """End it with this error."""


# Makes the part at a place: whose response it is, and what engines are asked.
NewPart: TypeAlias = Callable[[ResponseWriter, RequestPlan, int], PartRequest]


class ClaimedAnswer(Answering):
    """What a feature has under way for a request."""

    __slots__ = ()

    @abstractmethod
    async def answer(self) -> None:
        """Answer the request; raises ProxyError: the error for the client."""


class Claim(ClaimedCall):
    """A request that a feature answers, unless its ``single_reason`` says otherwise."""

    __slots__ = ()

    @property
    @abstractmethod
    def count(self) -> int:
        """For how many requests it counts where rates are limited."""

    @abstractmethod
    def charged_bytes(self, size: int, most: int, /) -> int:
        """Return how many bytes it is charged; ``size``: of its body; ``most``: of all requests.

        Raises:
            BodyTooLarge: it would be more than the router may hold.
        """

    @abstractmethod
    def begin(
        self,
        life: RequestLife,
        client: ClientResponse,
        plan: RequestPlan,
        ticket: Ticket,
        *,
        new_part: NewPart,
    ) -> ClaimedAnswer:
        """Begin to answer it; ``ticket``: of the whole request."""


class CallClaims(ABC):
    """Tells the requests that a feature answers from all others."""

    __slots__ = ()

    @abstractmethod
    def claim(self, call: GenerationRequest, /) -> Claim | None:
        """Return what the feature makes of a request; None: it is not the feature's."""
