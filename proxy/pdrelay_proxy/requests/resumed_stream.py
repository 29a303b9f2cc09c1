"""A stream that other engines continue: behind its opening, when its engine breaks off, or when a
feature takes it over.

The client sees one stream. core/protocol/replay.py remembers what it has got, and makes the request
for the rest.
"""

from pdrelay_proxy.core.model import GenerationRequest, Role
from pdrelay_proxy.core.protocol.continuation import Continuation
from pdrelay_proxy.core.protocol.disaggregation import solo_reason
from pdrelay_proxy.core.protocol.fault_table import BUSY, Failure, failure_of
from pdrelay_proxy.core.protocol.replay import Replay, can_resume, traced
from pdrelay_proxy.core.raw_json import Pieces, encode
from pdrelay_proxy.core.routing.retries import RetryAttempts
from pdrelay_proxy.errors import (
    EngineBusy,
    EngineError,
    EngineFault,
    OutOfTime,
    ProxyError,
    Refused,
    TurnedAway,
    forget_frames,
)
from pdrelay_proxy.requests.attempt import Terms
from pdrelay_proxy.requests.client_response import ClientResponse
from pdrelay_proxy.requests.dispatch import Dispatch
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.requests.lifecycle import RequestEvent, RequestState
from pdrelay_proxy.requests.terms import AnswerTerms, StreamCut, Takeover


def may_be_resumed(call: GenerationRequest) -> bool:
    """Tell whether the stream of a request may change its engine."""
    return can_resume(call.api, call.fields) and solo_reason(call.api, call.fields) is None


class ResumedStream:
    """The stream of one request, from as many decode engines as it takes."""

    __slots__ = ("_broken", "_client", "_dispatch", "_left", "_life", "_terms")

    def __init__(
        self,
        life: RequestLife,
        dispatch: Dispatch,
        client: ClientResponse,
        call: GenerationRequest,
    ) -> None:
        settings = dispatch.settings
        self._life = life
        self._dispatch = dispatch
        self._client = client
        self._left = settings.retries  # engines that may still continue it
        self._broken: EngineError | None = None  # why the stream broke off
        if settings.resume_streams and not dispatch.looks_back:
            client.replay = Replay(call.api, call.fields)
            call = call.with_fields(traced(call.fields))
        can_open = life.services.openings.are_wanted(settings)
        self._terms: Terms = AnswerTerms(
            call, RetryAttempts(settings.retries), can_split=True, can_open=can_open
        )

    async def answer(self) -> None:
        """Stream to the end of the answer; raises ProxyError: the error for the client."""
        try:
            while not await self._go_on():
                pass
        except Exception as error:
            self._terms.give_up(error)
            raise

    async def _go_on(self) -> bool:
        """Stream as far as one run of tries brings it; tell whether that was the end."""
        error: ProxyError | None = None
        takeover: Takeover | None = None
        try:
            await self._dispatch.answer(self._terms)
        except StreamCut as cut:
            takeover = cut.takeover
            forget_frames(cut)
        except ProxyError as failed:
            error = forget_frames(failed)
        if takeover is not None:
            try:
                self._terms = self._taken_over(takeover)
            except Exception:  # a bug: the feature must not wait for the stream
                takeover.give_up()
                raise
        elif error is None:
            return True
        elif not self._terms.is_takeover:
            return self._resume(error)
        elif isinstance(error, (OutOfTime, TurnedAway)):
            raise error  # no engine is at fault, and none gets more of a request that is over
        else:
            self._dispatch.close_attempt()
            self._terms = self._terms.instead(error)
        return False

    def _taken_over(self, takeover: Takeover) -> Terms:
        """Close the leg of a stream that is cut; return the terms of the rest."""
        self._dispatch.close_attempt()
        replay = self._client.replay
        if replay is None:
            raise RuntimeError("a stream was cut that no engine can continue")
        return takeover.terms(self._life, replay, self._terms, self._dispatch.settings)

    # ---- a stream that broke off

    def _resume(self, error: ProxyError) -> bool:
        """Have another engine go on; tell whether the stream had all of its tokens, and is ended.

        Raises:
            ProxyError: there is no stream to continue, or no engine may get a request for the rest.
        """
        broken = self._broken = self._why_broken(error)
        life = self._life
        client = self._client
        failure = (
            failure_of(broken) if life.state is RequestState.CONTINUING else Failure.BAD_RESPONSE
        )
        self._dispatch.close_attempt()
        replay = client.replay
        if replay is None:
            raise broken
        ending = replay.ending()
        if ending is not None:
            client.end_events(replay.gap() + ending)
            return True
        body = self._rest(replay, broken)
        self._terms = self._terms.rest(self._set_aside(failure), body)
        life.on(RequestEvent.RESUME)
        return False

    def _why_broken(self, error: ProxyError) -> EngineError:
        """Return why the stream broke off; raise the client's error if it had not begun."""
        state = self._life.state
        is_shown = state is RequestState.STREAMING or state is RequestState.CONTINUING
        if is_shown and isinstance(error, EngineError):
            return forget_frames(error)
        if is_shown and isinstance(error, Refused):
            return self._refused(error)
        if self._broken is None or is_shown:
            raise error
        raise self._broken from None

    def _refused(self, refused: Refused) -> EngineError:
        """Return the error of an engine that would not continue the stream; raise it if another one
        would not either.

        Raises:
            EngineError: the request itself is refused.
        """
        leg = self._life.record.decode
        why = f"{'' if leg is None else leg.instance} refused to go on with status {refused.status}"
        if failure_of(refused) is Failure.REFUSED:
            raise EngineError(why) from None
        return EngineBusy(why) if refused.status in BUSY else EngineFault(why)

    def _rest(self, replay: Continuation, broken: EngineError) -> Pieces:
        """Return the body of a request for the rest; raise ``broken`` if no engine may get one."""
        can_go_on = self._left > 0 and not self._dispatch.looks_back
        fields = replay.again() if can_go_on else None
        services = self._life.services
        if fields is None or not services.budget.grants(now=services.clock()):
            raise broken
        self._left -= 1
        return [encode(fields)]

    def _set_aside(self, failure: Failure) -> RetryAttempts:
        """Put the leg that broke off among the retries; return those of the rest."""
        record = self._life.record
        failed = record.decode
        record.set_aside(Role.DECODE, failure)
        return RetryAttempts(
            self._dispatch.settings.retries, set() if failed is None else {failed.instance}
        )
