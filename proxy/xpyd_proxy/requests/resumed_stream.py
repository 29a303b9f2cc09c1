"""A stream that another decode engine continues: behind the prefill engine's token, or when its own engine breaks off.

The client sees one stream. core/protocol/replay.py remembers what it has got, and makes the request for the rest.
"""

from typing import Final

from xpyd_proxy.core.model import GenerationRequest, Role
from xpyd_proxy.core.protocol.continuation import Continuation
from xpyd_proxy.core.protocol.disaggregation import solo_reason
from xpyd_proxy.core.protocol.engine_errors import BUSY, Failure, failure_of
from xpyd_proxy.core.protocol.replay import Replay, can_resume, traced
from xpyd_proxy.core.raw_json import Pieces, encode
from xpyd_proxy.core.routing.retries import RetryAttempts
from xpyd_proxy.errors import EngineBusy, EngineError, EngineFault, ProxyError, Refused
from xpyd_proxy.requests.client_response import ClientResponse
from xpyd_proxy.requests.dispatch import Dispatch
from xpyd_proxy.requests.life import RequestLife
from xpyd_proxy.requests.lifecycle import RequestEvent, RequestState
from xpyd_proxy.settings import FirstTokenFrom

_FROM_PREFILL: Final = FirstTokenFrom.PREFILL  # looking a member up takes as long as a call


def may_be_resumed(call: GenerationRequest) -> bool:
    """Tell whether the stream of a request may change its engine."""
    return can_resume(call.api, call.fields) and solo_reason(call.api, call.fields) is None


class ResumedStream:
    """The stream of one request, from as many decode engines as it takes."""

    __slots__ = ("_broken", "_client", "_dispatch", "_left", "_life")

    def __init__(self, life: RequestLife, dispatch: Dispatch, client: ClientResponse) -> None:
        self._life = life
        self._dispatch = dispatch
        self._client = client
        self._left = dispatch.settings.retries  # engines that may still continue it
        self._broken: EngineError | None = None  # why the stream broke off

    async def answer(self, call: GenerationRequest) -> None:
        """Stream to the end of the answer; raises ProxyError: the error for the client."""
        settings, client = self._dispatch.settings, self._client
        if settings.resume_streams:
            client.replay = Replay(call.api, call.fields)
            call = GenerationRequest(call.api, traced(call.fields), call.headers, call.rank)
        shows_token, retries = settings.first_token_from is _FROM_PREFILL, RetryAttempts(settings.retries)
        single_body: Pieces | None = None
        while True:
            try:
                await self._dispatch.answer(call, retries, single_body, can_split=True, shows_token=shows_token)
                return
            except ProxyError as error:
                broken = self._broken = self._why_broken(error)
            failure = failure_of(broken) if self._life.state is RequestState.CONTINUING else Failure.BAD_RESPONSE
            self._dispatch.close_attempt()
            replay = client.replay
            if replay is None:
                raise broken
            ending = replay.ending()
            if ending is not None:
                client.end_events(replay.gap() + ending)
                return
            single_body = self._rest(replay, broken)
            retries = self._set_aside(failure)
            self._life.on(RequestEvent.RESUME)

    def _why_broken(self, error: ProxyError) -> EngineError:
        """Return why the stream broke off; raise the error for the client if there is no stream to continue."""
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
        """Return the error of an engine that would not continue the stream; raise it if another one would not either.

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
        fields, of = replay.again() if self._left > 0 else None, self._life.of
        if fields is None or not of.budget.grants(now=of.clock()):
            raise broken
        self._left -= 1
        return [encode(fields)]

    def _set_aside(self, failure: Failure) -> RetryAttempts:
        """Put the leg that broke off among the retries; return those of the next engine, which is another one."""
        record = self._life.record
        failed = record.decode
        record.set_aside(Role.DECODE, failure)
        return RetryAttempts(self._dispatch.settings.retries, set() if failed is None else {failed.instance})
