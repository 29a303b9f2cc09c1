"""What a run of tries is about: what engines are asked, how they are chosen, what comes instead.

A request has one run (``AnswerTerms``). A stream that broke off has another for its rest
(``RestTerms``), and so has one that a feature takes over. requests/dispatch.py makes the tries.
"""

from abc import ABC, abstractmethod
from typing import Final

from pdrelay_proxy.core.model import GenerationRequest, Instance, Role, SingleEngineReason
from pdrelay_proxy.core.protocol import request_bodies
from pdrelay_proxy.core.protocol.continuation import Continuation
from pdrelay_proxy.core.protocol.disaggregation import PROMPTS
from pdrelay_proxy.core.raw_json import Pieces, encode_in_pieces
from pdrelay_proxy.core.routing.retries import RetryAttempts
from pdrelay_proxy.core.routing.route import split_reason
from pdrelay_proxy.errors import NoInstance
from pdrelay_proxy.requests.attempt import Attempt, Terms
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.settings import Settings

_DECODE: Final = Role.DECODE
_PREFILL_FAILED: Final = SingleEngineReason.PREFILL_FAILED


class AnswerTerms(Terms):
    """A request, as its client sent it."""

    __slots__ = ()

    def choose(self, attempt: Attempt, /) -> tuple[Instance | None, Instance]:
        """Choose two engines, or one where something of the request or the fleet wants that."""
        call = self.call
        reason = attempt.plan.single_reason
        if self.retries.is_alone:
            reason = _PREFILL_FAILED
        elif reason is None and call is not None and not self.can_split:
            reason = split_reason(attempt.fleet, call.api, call.fields)
        chosen = attempt.route(reason)
        return chosen.prefill, chosen.decode

    def body_alone(self, attempt: Attempt, /) -> Pieces:
        """Return the whole request."""
        call = self.call
        if call is None:
            return attempt.plan.body
        fields = request_bodies.named(call.api, call.fields, attempt.id)
        return encode_in_pieces(fields, PROMPTS[call.api], call.shared)

    def rest(self, retries: RetryAttempts, body: Pieces, /) -> Terms:
        """Return those for the rest."""
        return RestTerms(self.call, retries, body)


class RestTerms(AnswerTerms):
    """The rest of a stream that broke off, from one engine."""

    __slots__ = ("body",)

    def __init__(
        self, call: GenerationRequest | None, retries: RetryAttempts, body: Pieces
    ) -> None:
        """``body``: what the engine is asked."""
        Terms.__init__(self, call, retries)
        self.body = body

    def choose(self, attempt: Attempt, /) -> tuple[Instance | None, Instance]:
        """Choose a decode engine."""
        engines = attempt.usable(_DECODE)
        if not engines:
            raise NoInstance("no decode engine has the weights that the stream began with")
        return None, attempt.choose_decode(engines)

    def body_alone(self, _attempt: Attempt, /) -> Pieces:
        """Return the request for the rest."""
        return self.body


class Takeover(ABC):
    """A feature that takes a stream over from the engine that has it."""

    __slots__ = ()

    @abstractmethod
    def terms(
        self,
        life: RequestLife,
        replay: Continuation,
        before: Terms,
        settings: Settings,
        /,
    ) -> Terms:
        """Return those of the rest: the stream was cut, and its leg is closed.

        ``replay``: what its client has got; ``before``: the terms that it was streamed by.
        """

    @abstractmethod
    def give_up(self) -> None:
        """Hear that the request ends where the stream was cut: the router has a bug."""


class StreamCut(Exception):
    """A stream is cut here, to be taken over."""

    def __init__(self, takeover: Takeover) -> None:
        super().__init__("the stream is taken over")
        self.takeover = takeover
