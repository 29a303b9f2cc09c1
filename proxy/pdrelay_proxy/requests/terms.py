"""What a run of tries is about: what engines are asked, how they are chosen, what comes instead.

A request has one run (``AnswerTerms``). A stream that broke off has another for its rest
(``RestTerms``), and so has one that a feature takes over. requests/dispatch.py makes the tries.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import msgspec

from pdrelay_proxy.core.model import GenerationRequest, Instance, Role, SingleEngineReason
from pdrelay_proxy.core.protocol import request_bodies
from pdrelay_proxy.core.protocol.continuation import Continuation
from pdrelay_proxy.core.protocol.disaggregation import PROMPTS
from pdrelay_proxy.core.raw_json import Pieces, encode_in_pieces
from pdrelay_proxy.core.routing.retries import LegFailed, RetryAttempts
from pdrelay_proxy.core.routing.route import split_reason
from pdrelay_proxy.errors import NoInstance, ProxyError
from pdrelay_proxy.requests.engine_choice import EngineChoice
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.settings import Settings

_DECODE: Final = Role.DECODE  # looking a member up takes as long as a call
_PREFILL_FAILED: Final = SingleEngineReason.PREFILL_FAILED


class Terms:
    """Of one run of tries: what is not overridden is as for any request.

    A class, because a compiled call of a Protocol is slow.
    """

    __slots__ = ("call", "can_open", "can_split", "ids", "is_takeover", "retries")

    def __init__(
        self,
        call: GenerationRequest | None,
        retries: RetryAttempts,
        *,
        can_split: bool = False,
        can_open: bool = False,
    ) -> None:
        """``call``: what two engines are asked; None: the endpoint generates no text.

        ``can_split``: its fields were looked at, and need no engine of their own; ``can_open``: its
        stream may begin with what a prefill engine has answered.
        """
        self.call = call
        self.retries = retries
        self.can_split = can_split
        self.can_open = can_open
        self.ids: msgspec.Raw | None = None  # of a chat's prompt, in place of its messages
        # A stream that engines take over from another one that still has it, until they have begun.
        self.is_takeover = False

    def choose(self, choice: EngineChoice, /) -> tuple[Instance | None, Instance]:
        """Choose the prefill engine and the decode engine; None: the latter serves it alone."""
        raise NotImplementedError

    def body_alone(self, choice: EngineChoice, /) -> Pieces:
        """Return what a decode engine is asked that serves it alone."""
        return choice.plan.body

    def take_retry(
        self, failed: LegFailed, others: Sequence[Instance], *, may_be_alone: bool
    ) -> bool:
        """Tell whether there is another try, with so many engines of that role, and count it."""
        return self.retries.take(failed, others, may_be_alone=may_be_alone)

    def seconds_for(self, _engine: Instance, /) -> float:
        """Return how long an engine may take for its part in a takeover."""
        return math.inf

    def limit(self, engine: Instance, /) -> str:
        """Say how long that is, for an error."""
        return f"{self.seconds_for(engine):g} s"

    def handed_over(self, prefill: Instance, /) -> None:
        """Hear that a prefill engine has the KV cache of the prompt."""

    def leg_failed(self, engine: Instance, /) -> None:
        """Hear that the leg of an engine has failed."""

    def begun(self) -> None:
        """Hear that a stream has begun to be shown."""

    def instead(self, error: ProxyError, /) -> "Terms":
        """Return what a takeover goes on with after its tries; raises ProxyError: with nothing."""
        raise error

    def rest(self, retries: RetryAttempts, body: Pieces, /) -> "Terms":
        """Return those for the rest of a stream that broke off; ``body``: what one is asked."""
        return RestTerms(self.call, retries, body)

    def give_up(self, error: Exception, /) -> None:
        """Hear what the request ends with."""


class AnswerTerms(Terms):
    """A request, as its client sent it."""

    __slots__ = ()

    def choose(self, choice: EngineChoice, /) -> tuple[Instance | None, Instance]:
        """Choose two engines, or one where something of the request or the fleet wants that."""
        call = self.call
        reason = choice.plan.single_reason
        if self.retries.is_alone:
            reason = _PREFILL_FAILED
        elif reason is None and call is not None and not self.can_split:
            reason = split_reason(choice.fleet, call.api, call.fields)
        chosen = choice.route(reason)
        return chosen.prefill, chosen.decode

    def body_alone(self, choice: EngineChoice, /) -> Pieces:
        """Return the whole request."""
        call = self.call
        if call is None:
            return choice.plan.body
        fields = request_bodies.named(call.api, call.fields, choice.request)
        return encode_in_pieces(fields, PROMPTS[call.api], call.shared)


class RestTerms(Terms):
    """The rest of a stream that broke off, from one engine."""

    __slots__ = ("body",)

    def __init__(
        self, call: GenerationRequest | None, retries: RetryAttempts, body: Pieces
    ) -> None:
        """``body``: what the engine is asked."""
        Terms.__init__(self, call, retries)
        self.body = body

    def choose(self, choice: EngineChoice, /) -> tuple[Instance | None, Instance]:
        """Choose a decode engine."""
        engines = choice.usable(_DECODE)
        if not engines:
            raise NoInstance("no decode engine has the weights that the stream began with")
        return None, choice.choose_decode(engines)

    def body_alone(self, _choice: EngineChoice, /) -> Pieces:
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
