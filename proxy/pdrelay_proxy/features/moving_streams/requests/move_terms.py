"""The tries of a stream that moves: two engines go on with it, or one if they cannot.

Terms as requests/dispatch.py goes by them; requests/resumed_stream.py puts them in a row.
"""

from collections.abc import Sequence, Set
from typing import Final

from pdrelay_proxy.core.model import (
    Api,
    GenerationRequest,
    Instance,
    InstanceId,
    Role,
    RoutingHints,
)
from pdrelay_proxy.core.protocol.continuation import Continuation, prompt_of
from pdrelay_proxy.core.protocol.fault_table import failure_of
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_proxy.core.raw_json import Pieces, encode
from pdrelay_proxy.core.request_record import MoveOutcome
from pdrelay_proxy.core.routing.retries import LegFailed, RetryAttempts
from pdrelay_proxy.errors import (
    EngineError,
    NoInstance,
    NoMatchingInstance,
    ProxyError,
    Refused,
)
from pdrelay_proxy.features.moving_streams.core.stream_engines import as_stream_source
from pdrelay_proxy.features.moving_streams.requests.stream_move import StreamMove, move_timeout
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.requests.attempt import Attempt, Terms
from pdrelay_proxy.requests.client_response import ClientGone
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.requests.lifecycle import RequestEvent, RequestState
from pdrelay_proxy.requests.terms import RestTerms, Takeover
from pdrelay_proxy.settings import Settings

_CHAT: Final = Api.CHAT
_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE


class MoveTakeover(Takeover):
    """A stream that was cut to move."""

    __slots__ = ("_move",)

    def __init__(self, move: StreamMove) -> None:
        self._move = move

    def terms(
        self,
        life: RequestLife,
        replay: Continuation,
        before: Terms,
        settings: Settings,
        /,
    ) -> Terms:
        """Return those of the rest, for two engines."""
        move = self._move
        rest = replay.rest()
        call = before.call
        if rest is None or call is None:
            raise RuntimeError("a stream was cut that no engine can continue")
        life.record.move_on(move.record)
        life.on(RequestEvent.TAKE_OVER)
        is_chat = call.api is _CHAT
        fields = rest.fields if is_chat else rest.fields | prompt_of(call.api, rest.tokens)
        call = call.with_fields(fields)
        retries = RetryAttempts(settings.retries, {move.source.id})
        terms = MoveTerms(call, retries, move, life, replay, decode_s=move_timeout(settings))
        if is_chat:
            terms.ids = rest.tokens
        return terms

    def give_up(self) -> None:
        """Hear that no engine goes on."""
        self._move.end(MoveOutcome.FAILED)


class _MoveTerms(Terms):
    """What both kinds have in common."""

    __slots__ = ("_decode_s", "_life", "_move", "_replay")

    def __init__(
        self,
        call: GenerationRequest | None,
        retries: RetryAttempts,
        move: StreamMove,
        life: RequestLife,
        replay: Continuation,
        *,
        decode_s: float,
    ) -> None:
        """``decode_s``: seconds that a decode engine has for its part."""
        Terms.__init__(self, call, retries)
        self.is_takeover = True
        self._move = move
        self._life = life
        self._replay = replay
        self._decode_s = decode_s

    def seconds_for(self, engine: Instance, /) -> float:
        """Return how long an engine may take for its part."""
        return self._decode_s if engine.role is _DECODE else self._move.seconds_for(engine)

    def limit(self, engine: Instance, /) -> str:
        """Say how long that is."""
        return f"{self.seconds_for(engine):g} s, the time for a move"

    def begun(self) -> None:
        """Hear that the stream goes on: from now on it is one like any other."""
        self.is_takeover = False
        self._move.goes_on()

    def rest(self, retries: RetryAttempts, body: Pieces, /) -> Terms:
        """Return those for the rest of the stream, should it break off once it has moved."""
        return RestAfterMove(self.call, retries, body, self._move)

    def give_up(self, error: Exception, /) -> None:
        """Hear what the request ends with."""
        is_left = isinstance(error, ClientGone)
        self._move.end(MoveOutcome.DISCONNECTED if is_left else MoveOutcome.FAILED)

    def _set_back(self, error: ProxyError) -> None:
        """Have the request choose engines once more; the leg that failed is among its retries."""
        life = self._life
        record = life.record
        if life.state is not RequestState.ROUTING:
            life.on(RequestEvent.RETRY)
        if isinstance(error, (EngineError, Refused)):
            failed = _PREFILL if record.decode is None else _DECODE
            record.set_aside(failed, failure_of(error))
        record.start_over()


class MoveTerms(_MoveTerms):
    """Two engines go on: one has the KV cache, or computes it, and the other reads it."""

    __slots__ = ()

    def choose(self, attempt: Attempt, /) -> tuple[Instance | None, Instance]:
        """Choose the engine that the stream leaves, or a prefill engine, and a decode engine."""
        move = self._move
        pair = move.pair
        move.pair = None
        attempt.mode = TransferMode.PULL  # the engine is asked to be read from
        if pair is None:
            pair = pair_for_move(
                attempt.fleet,
                attempt.plan.hints,
                self.retries,
                move.lender,
                files=attempt.plan.files,
                prompt_holder=move.prompt_holder,
                full=move.full_engines(),
            )
        attempt.note_expected()
        return pair

    def take_retry(
        self, failed: LegFailed, others: Sequence[Instance], *, may_be_alone: bool
    ) -> bool:
        """Tell whether there is another try; the rest goes to another decode engine or back.

        What is not sent again must not use up the budget, for all moves to an engine fail at the
        same time when it dies.
        """
        del may_be_alone
        needs_other = failed.instance.role is _DECODE
        return self.retries.take(failed, others, needs_other=needs_other)

    def handed_over(self, prefill: Instance, /) -> None:
        """Hear that a prefill engine has the KV cache."""
        self._move.handed_over(prefill)

    def leg_failed(self, engine: Instance, /) -> None:
        """Hear that the leg of an engine has failed."""
        if engine.role is _PREFILL and self._move.is_lent_by(engine):
            self._move.lender_failed()

    def instead(self, error: ProxyError, /) -> Terms:
        """Two engines could not go on: have one do it, which computes the rest anew, or had it.

        Raises:
            EngineError: no engine may get a request for the rest.
        """
        self._set_back(error)
        fields = self._replay.again()
        services = self._life.services
        if fields is None or not services.budget.grants(now=services.clock()):
            raise _could_not_move(error)
        self.retries.left = max(self.retries.left, 1)
        return MoveAloneTerms(
            self.call,
            self.retries,
            self._move,
            self._life,
            self._replay,
            decode_s=self._decode_s,
            body=[encode(fields)],
        )


class MoveAloneTerms(_MoveTerms):
    """One engine goes on alone; what no other one takes goes back."""

    __slots__ = ("_body", "_goes_back")

    def __init__(
        self,
        call: GenerationRequest | None,
        retries: RetryAttempts,
        move: StreamMove,
        life: RequestLife,
        replay: Continuation,
        *,
        decode_s: float,
        body: Pieces,
    ) -> None:
        """``body``: what the engine is asked."""
        _MoveTerms.__init__(self, call, retries, move, life, replay, decode_s=decode_s)
        move.is_alone = True
        self._body = body
        self._goes_back = False  # to the engine that the stream came from

    def choose(self, attempt: Attempt, /) -> tuple[Instance | None, Instance]:
        """Choose another engine, or, if all else fails, the one that the stream came from."""
        avoided = self.retries.avoided
        usable = () if self._goes_back else attempt.usable(_DECODE)
        decodes = [decode for decode in usable if decode.id not in avoided]
        others = _with_room(decodes, self._move.full_engines())
        engines = others or _with_same_weights(attempt, self._move.source)
        if not engines:
            raise NoInstance("the engine that the stream has left has other weights by now")
        return None, attempt.choose_decode(engines)

    def body_alone(self, _attempt: Attempt, /) -> Pieces:
        """Return the request for the rest."""
        return self._body

    def take_retry(
        self, failed: LegFailed, others: Sequence[Instance], *, may_be_alone: bool
    ) -> bool:
        """Tell whether there is another try: that of the engine that has made the stream so far is
        the last, whatever others say.
        """
        del may_be_alone
        if self.retries.take(failed, others):
            return True
        self._goes_back = failed.instance.id != self._move.source.id
        return self._goes_back

    def instead(self, error: ProxyError, /) -> Terms:
        """Nothing is left to try."""
        self._set_back(error)
        raise _could_not_move(error)


class RestAfterMove(RestTerms):
    """The rest of a stream that broke off once it had moved."""

    __slots__ = ("_move",)

    def __init__(
        self,
        call: GenerationRequest | None,
        retries: RetryAttempts,
        body: Pieces,
        move: StreamMove,
    ) -> None:
        RestTerms.__init__(self, call, retries, body)
        self._move = move

    def choose(self, attempt: Attempt, /) -> tuple[Instance | None, Instance]:
        """Choose a decode engine; the one that the stream has left, if no other can go on."""
        source = self._source(attempt)
        return (None, attempt.choose_decode(source)) if source else super().choose(attempt)

    def rest(self, retries: RetryAttempts, body: Pieces, /) -> Terms:
        """Return those for the rest, should it break off once more."""
        return RestAfterMove(self.call, retries, body, self._move)

    def _source(self, attempt: Attempt) -> Sequence[Instance]:
        avoided = self.retries.avoided
        if any(decode.id not in avoided for decode in attempt.usable(_DECODE)):
            return ()
        member = attempt.fleet.registry.get(self._move.source.id)
        if member is None or member.instance.id in avoided:
            return ()
        return _with_same_weights(attempt, as_stream_source(member))


def pair_for_move(
    fleet: LiveFleet,
    hints: RoutingHints,
    retries: RetryAttempts,
    lender: Instance | None,
    *,
    files: str | None,
    prompt_holder: InstanceId | None,
    full: Set[InstanceId],
) -> tuple[Instance, Instance]:
    """Choose the engine that the stream leaves, which has its KV cache, and a decode engine that
    may read from it.

    Without one, a prefill engine computes the prompt and the tokens so far: ``prompt_holder`` has
    the prompt, or else another one. ``files``: of the model that the stream has begun with;
    ``full``: the engines without KV room. Raises ProxyError: there are no two such engines now.
    """
    hints = hints.once_more()
    usable = fleet.with_files(fleet.usable(_DECODE), hints.model, files)
    decodes = _with_room([engine for engine in usable if engine.id not in retries.avoided], full)
    if not decodes:
        raise NoInstance("no other decode engine can go on with the stream")
    if lender is not None and (readers := fleet.readers(lender, decodes)):
        return lender, fleet.pair([lender], readers, hints)[1]
    prefills = retries.among(fleet.usable(_PREFILL))
    holders = [
        engine
        for engine in prefills
        if engine.id == prompt_holder and fleet.registry.fitting(engine, decodes, hints.model)
    ]
    prefill, decode = fleet.pair(holders or prefills, decodes, hints)
    if prefill is None:
        raise NoMatchingInstance("no prefill engine can go on with the stream")
    return prefill, decode


def _with_same_weights(attempt: Attempt, source: Instance) -> Sequence[Instance]:
    """Return the engine that a stream has left, unless it was replaced: it is drained, and its next
    process may serve other files under the same name.
    """
    return attempt.with_same_files([source])


def _with_room(decodes: Sequence[Instance], full: Set[InstanceId]) -> Sequence[Instance]:
    """Leave out the engines that streams leave for want of KV room, if there are others."""
    return ([decode for decode in decodes if decode.id not in full] or decodes) if full else decodes


def _could_not_move(error: ProxyError) -> EngineError:
    """Return the error for the client."""
    if isinstance(error, EngineError):
        return error
    return EngineError(f"the stream could not move: {error}")
