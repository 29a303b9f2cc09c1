"""A stream that other engines continue: behind P's token, when its engine breaks off, or when its
engine drains.

The client sees one stream. core/protocol/replay.py remembers what it has got, and makes the request
for the rest.
"""

from typing import Final

from pdrelay_proxy.core.model import Api, GenerationRequest, Role
from pdrelay_proxy.core.protocol.continuation import Continuation, prompt_of
from pdrelay_proxy.core.protocol.disaggregation import solo_reason
from pdrelay_proxy.core.protocol.fault_table import BUSY, Failure, failure_of
from pdrelay_proxy.core.protocol.replay import Replay, can_resume, traced
from pdrelay_proxy.core.raw_json import Pieces, encode
from pdrelay_proxy.core.request_record import MoveOutcome
from pdrelay_proxy.core.routing.retries import RetryAttempts
from pdrelay_proxy.errors import (
    EngineBusy,
    EngineError,
    EngineFault,
    OutOfTime,
    ProxyError,
    Refused,
    TurnedAway,
)
from pdrelay_proxy.requests.client_response import ClientGone, ClientResponse
from pdrelay_proxy.requests.dispatch import Dispatch
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.requests.lifecycle import RequestEvent, RequestState
from pdrelay_proxy.requests.stream_move import StreamCut, StreamMove
from pdrelay_proxy.settings import FirstTokenFrom

_FROM_PREFILL: Final = FirstTokenFrom.PREFILL  # looking a member up takes as long as a call
_CHAT: Final = Api.CHAT


def may_be_resumed(call: GenerationRequest) -> bool:
    """Tell whether the stream of a request may change its engine."""
    return can_resume(call.api, call.fields) and solo_reason(call.api, call.fields) is None


class ResumedStream:
    """The stream of one request, from as many decode engines as it takes."""

    __slots__ = ("_broken", "_client", "_dispatch", "_left", "_life", "_move")

    def __init__(self, life: RequestLife, dispatch: Dispatch, client: ClientResponse) -> None:
        self._life = life
        self._dispatch = dispatch
        self._client = client
        self._left = dispatch.settings.retries  # engines that may still continue it
        self._broken: EngineError | None = None  # why the stream broke off
        self._move: StreamMove | None = None  # from the engine that it was cut at

    async def answer(self, call: GenerationRequest) -> None:
        """Stream to the end of the answer; raises ProxyError: the error for the client."""
        settings = self._dispatch.settings
        client = self._client
        if settings.resume_streams and not self._dispatch.looks_back:
            client.replay = Replay(call.api, call.fields)
            call = GenerationRequest(call.api, traced(call.fields), call.headers, call.rank)
        shows_token = settings.first_token_from is _FROM_PREFILL
        try:
            await self._answer(call, shows_token=shows_token)
        except ClientGone:
            self._end_move(MoveOutcome.DISCONNECTED)
            raise
        except Exception:
            self._end_move(MoveOutcome.FAILED)
            raise

    async def _answer(self, call: GenerationRequest, *, shows_token: bool) -> None:
        single_body: Pieces | None = None
        retries = RetryAttempts(self._dispatch.settings.retries)
        while True:
            error: ProxyError | None = None
            cut_for: StreamMove | None = None
            try:
                await self._dispatch.answer(
                    call,
                    retries,
                    single_body,
                    can_split=True,
                    shows_token=shows_token,
                    move=self._moving(),
                )
            except StreamCut as cut:
                cut_for = cut.move
                cut.with_traceback(None)  # it leads here: a circle
            except ProxyError as failed:
                error = failed.with_traceback(None)
            move = self._moving()
            if cut_for is not None:
                call = self._leave(cut_for, call)
                shows_token = False
                single_body = None
                retries = RetryAttempts(self._dispatch.settings.retries, {cut_for.source.id})
            elif error is None:
                return
            elif move is not None:
                single_body = self._alone(move, error, retries)
            else:
                broken = self._broken = self._why_broken(error)
                found = self._resume(broken)
                if found is None:
                    return
                single_body, retries = found

    # ---- a stream that moves

    def _leave(self, move: StreamMove, call: GenerationRequest) -> GenerationRequest:
        """Close the leg of a stream that is cut; return the request for the rest, for two
        engines.
        """
        life = self._life
        replay = self._client.replay
        self._move = move
        self._dispatch.close_attempt()
        rest = None if replay is None else replay.rest()
        if rest is None:
            raise RuntimeError("a stream was cut that no engine can continue")
        life.record.move_on(move.record)
        life.on(RequestEvent.MOVE)
        fields = rest.fields
        if call.api is _CHAT:
            move.ids = rest.tokens
        else:
            fields = fields | prompt_of(call.api, rest.tokens)
        return GenerationRequest(call.api, fields, call.headers, call.rank)

    def _alone(self, move: StreamMove, error: ProxyError, retries: RetryAttempts) -> Pieces:
        """Two engines could not go on: have one do it, which computes the rest anew, or had it
        before.

        Raises:
            ProxyError: it was tried, or may not be, or the request is out of time.
        """
        if isinstance(error, (OutOfTime, TurnedAway)):
            raise error  # no engine is at fault, and none gets more of a request that is over
        life = self._life
        record = self._life.record
        replay = self._client.replay
        self._dispatch.close_attempt()
        if life.state is not RequestState.ROUTING:
            life.on(RequestEvent.RETRY)
        if isinstance(error, (EngineError, Refused)):
            failed = Role.PREFILL if record.decode is None else Role.DECODE
            record.set_aside(failed, failure_of(error))
        record.start_over()
        fields = None if replay is None or move.is_alone else replay.again()
        if fields is None or not life.services.budget.grants(now=life.services.clock()):
            raise (
                error
                if isinstance(error, EngineError)
                else EngineError(f"the stream could not move: {error}")
            )
        move.is_alone = True
        retries.left = max(retries.left, 1)
        return [encode(fields)]

    def _moving(self) -> StreamMove | None:
        """Return the move that is under way."""
        move = self._move
        return None if move is None or move.is_over else move

    def _end_move(self, outcome: MoveOutcome) -> None:
        """The request is over."""
        if self._move is not None:
            self._move.end(outcome)

    # ---- a stream that broke off

    def _resume(self, broken: EngineError) -> tuple[Pieces, RetryAttempts] | None:
        """Return what the next engine is asked; None: the stream had all of its tokens, and is
        ended.

        Raises:
            EngineError: no engine may get a request for the rest.
        """
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
            return None
        single_body = self._rest(replay, broken)
        retries = self._set_aside(failure)
        life.on(RequestEvent.RESUME)
        return single_body, retries

    def _why_broken(self, error: ProxyError) -> EngineError:
        """Return why the stream broke off; raise the error for the client if there is no stream to
        continue.
        """
        state = self._life.state
        is_shown = state is RequestState.STREAMING or state is RequestState.CONTINUING
        if is_shown and isinstance(error, EngineError):
            return error.with_traceback(None)  # it leads here: a circle
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
        """Put the leg that broke off among the retries; return those of the next engine, which is
        another one.
        """
        record = self._life.record
        failed = record.decode
        record.set_aside(Role.DECODE, failure)
        return RetryAttempts(
            self._dispatch.settings.retries, set() if failed is None else {failed.instance}
        )
