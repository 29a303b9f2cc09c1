"""Now and then a greedy request is answered once more by its prefill engine alone, to see whether KV arrives right."""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, Self

from pdrelay_proxy.core.fleet.pair_health import Pair
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import EngineResponse, GenerationRequest, Instance, LegRequest
from pdrelay_proxy.core.protocol.canary import CANARY, CanaryOutcome, compared, may_repeat, repetition, shown_text
from pdrelay_proxy.core.raw_json import encode
from pdrelay_proxy.core.request_record import RequestOutcome, RequestRecord
from pdrelay_proxy.errors import EngineError, UnknownInstance
from pdrelay_proxy.requests.release import Background
from pdrelay_proxy.requests.response import ResponseWriter

logger = logging.getLogger(__name__)
BUSY: Final = 8  # requests at a prefill engine, from which on it repeats none
ANSWER_MOST: Final = 1 << 18  # bytes of an answer that are kept for the comparison
_TIMEOUT_S: Final = 30.0
_AT_ONCE: Final = 1
_OK: Final = 200
_WELL: Final = RequestOutcome.OK  # looking a member up takes as long as a call
_SKIPPED, _FAILED, _DIFFERENT = CanaryOutcome.SKIPPED, CanaryOutcome.FAILED, CanaryOutcome.DIFFERENT


class CanarySender(Protocol):
    """Sends one leg, and waits for its whole answer."""

    async def ask(self, leg: LegRequest, *, timeout_s: float) -> EngineResponse:
        """Post; raises EngineError."""
        ...


class KeptResponse:
    """A client's response whose bytes are kept, too, as far as they are few. Implements ResponseWriter."""

    __slots__ = ("_kept", "_size", "_writer", "call", "keep_alive", "streams")

    def __init__(self, writer: ResponseWriter, call: GenerationRequest) -> None:
        self._writer = writer
        self._kept: list[bytes] | None = []
        self._size = 0
        self.call = call
        self.keep_alive = writer.keep_alive
        self.streams = False

    @property
    def body(self) -> bytes | None:
        """All of its body; None: it was too long."""
        return None if self._kept is None else b"".join(self._kept)

    @property
    def begun(self) -> bool:
        """Tell whether the head was written."""
        return self._writer.begun

    @property
    def relay(self) -> Callable[[bytes], object] | None:
        """Nothing is passed on unseen."""
        return None

    def begin(self, status: int, lines: bytes, body: bytes, *, streams: bool, last: bool = False) -> None:
        """Write the head and what comes with it."""
        self.streams = streams
        self._keep(body)
        self._writer.keep_alive = self.keep_alive
        self._writer.begin(status, lines, body, streams=streams, last=last)

    def write(self, piece: bytes, /) -> None:
        """Write a piece of a stream."""
        self._keep(piece)
        self._writer.write(piece)

    def end(self, piece: bytes = b"", /) -> None:
        """Write the end of a stream."""
        self._keep(piece)
        self._writer.end(piece)

    def close(self) -> None:
        """Let go of the connection."""
        self._writer.keep_alive = self.keep_alive
        self._writer.close()

    def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > ANSWER_MOST:
            self._kept = None
        elif piece and self._kept is not None:
            self._kept.append(piece)


class Canaries:
    """Use it as a context manager: at the end it waits for what is under way.

    The prefill engine has computed the KV that the decode engine has got, so its own text of the prompt is the right
    one, and costs it no prefill: the prompt is in its cache. No key pays for it.
    """

    def __init__(
        self,
        every: int,
        engines: CanarySender,
        registry: Registry,
        counted: Counter[tuple[str, ...]],
        *,
        differs: Callable[[Pair, float], None],
        clock: Callable[[], float],
    ) -> None:
        """``every``: one in so many requests; ``counted``: by CanaryOutcome; ``differs`` is told of a pair at fault."""
        self._every = self._left = every
        self._engines = engines
        self._registry = registry
        self._counted = counted
        self._differs = differs
        self._clock = clock
        self._background = Background(_AT_ONCE)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._background.drain(0.0)

    def takes(self, call: GenerationRequest) -> bool:
        """Tell whether this request is one: the first suitable one after so many."""
        if self._left > 1:
            self._left -= 1
            return False
        if not may_repeat(call):
            return False
        self._left = self._every
        return True

    def over(self, record: RequestRecord, kept: KeptResponse) -> None:
        """The request is over, and its client has its answer: repeat it, if it was served by two engines."""
        leg, prefill = self._leg(record, kept.call), record.prefill
        body = kept.body
        shown = None if leg is None or body is None else shown_text(body, streams=kept.streams)
        if leg is None or prefill is None or record.decode is None or shown is None:
            self._count(_SKIPPED)
            return
        pair = prefill.instance, record.decode.instance
        work = partial(self._repeat, leg, kept.call, shown, pair, record.request_id)
        if not self._background.start(work):
            self._count(_SKIPPED)

    def _leg(self, record: RequestRecord, call: GenerationRequest) -> LegRequest | None:
        """Return what the prefill engine is asked; None: the KV of the answer is not of one pair, or it is busy."""
        prefill = record.prefill
        is_plain = not (record.single_reason or record.retries or record.moves or record.prefill_error)
        if prefill is None or not is_plain or record.outcome is not _WELL:
            return None
        try:
            member = self._registry.member(prefill.instance)
        except UnknownInstance:
            return None
        if member.load.in_flight >= BUSY:
            return None
        return LegRequest(member.instance, call.path, encode(repetition(call)), _headers(record, call, member.instance))

    async def _repeat(self, leg: LegRequest, call: GenerationRequest, shown: str, pair: Pair, name: str) -> None:
        try:
            answer = await self._engines.ask(leg, timeout_s=_TIMEOUT_S)
        except EngineError as error:
            logger.info("request %s was not repeated by %s: %s", name, pair[0], error)
            self._count(_FAILED)
            return
        outcome = _FAILED if answer.status != _OK else compared(call.api, shown, answer.body)
        self._count(outcome)
        if outcome is _DIFFERENT:
            logger.warning("request %s: %s alone makes another text than %s has made with its KV cache", name, *pair)
            self._differs(pair, self._clock())
        elif outcome is _FAILED:
            logger.info("request %s was repeated by %s with status %d", name, pair[0], answer.status)

    def _count(self, outcome: CanaryOutcome) -> None:
        self._counted[(outcome.value,)] += 1


def _headers(record: RequestRecord, call: GenerationRequest, engine: Instance) -> tuple[tuple[bytes, bytes], ...]:
    headers = (*call.headers, (b"x-request-id", f"{record.request_id}{CANARY}".encode()))
    return headers if engine.rank is None else (*headers, (b"x-data-parallel-rank", b"%d" % engine.rank))
