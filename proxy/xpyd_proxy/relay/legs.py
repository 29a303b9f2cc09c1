"""Single legs: sent, timed, watched, and not waited for for ever."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xpyd_proxy.core.journey import Journey, Visit
from xpyd_proxy.core.model import Answer, Handover, Instance, Leg
from xpyd_proxy.core.ports import Auditor, Engines, Stream, Watcher
from xpyd_proxy.core.retries import LegFailed
from xpyd_proxy.core.sse import WholeLines
from xpyd_proxy.core.usage import prompt_tokens, prompt_tokens_in
from xpyd_proxy.core.verdict import check_prefill
from xpyd_proxy.errors import EngineError, EngineTimeout, Refused
from xpyd_proxy.relay.attempt import Attempt
from xpyd_proxy.relay.opened import Opened
from xpyd_proxy.relay.reply import Reply, begin
from xpyd_proxy.relay.streaming import Streaming
from xpyd_proxy.relay.waiting import at_most
from xpyd_proxy.relay.watching import Watched


@dataclass(frozen=True, slots=True)
class Legs:
    """Sends legs. What goes wrong with one is raised as LegFailed."""

    engines: Engines
    clock: Callable[[], float]  # seconds; only differences count
    watchers: Sequence[Watcher] = ()
    auditors: Sequence[Auditor] = ()

    async def prefill(
        self, attempt: Attempt, prefill: Instance, body: bytes, read: Callable[[Answer], Handover]
    ) -> Handover:
        """Get the prompt computed; ``read`` takes from the answer what it is good for, or raises."""
        visit = attempt.journey.prefill = Visit(prefill.id)
        with Watched(self.watchers, prefill, attempt.request, self.clock) as watched:
            start = self.clock()
            try:
                answer = await self.engines.ask(attempt.leg(prefill, body), timeout_s=attempt.patience.prefill_s)
                check_prefill(prefill.id, answer)
                found = read(answer)
            except (EngineError, Refused) as error:
                raise LegFailed(prefill, error) from error
            finally:
                visit.ms = (self.clock() - start) * 1000
            watched.answered()
        attempt.counted.prefill = found.counted
        self.compare(attempt, attempt.journey)
        return found

    async def decode(
        self, attempt: Attempt, decode: Instance, body: bytes, sent: Callable[[], None], path: str | None = None
    ) -> Reply:
        """Get a good answer from a decode engine; its request stays open as long as the attempt does."""
        opening = Opened()
        reply = await opening.kept(self._decode(attempt, decode, attempt.leg(decode, body, path), sent, opening))
        attempt.opened.take(opening)  # nothing is awaited any more: it is ours or theirs
        return reply

    async def _decode(
        self, attempt: Attempt, decode: Instance, leg: Leg, sent: Callable[[], None], opening: Opened
    ) -> Reply:
        visit = attempt.journey.decode = Visit(decode.id)
        watched = Watched(self.watchers, decode, attempt.request, self.clock)
        opening.push(watched.__enter__().__exit__)
        start = self.clock()
        try:
            stream, first, goes_on = await self._first(attempt, leg, sent, opening)
        except (EngineError, Refused) as error:
            raise LegFailed(decode, error) from error
        finally:
            visit.ms = (self.clock() - start) * 1000
        watched.answered()
        if attempt.journey.solo is None:
            self.hear(attempt, prompt_tokens_in(first) if goes_on else prompt_tokens(first))
        if not goes_on:
            return Reply(stream.content_type, first)
        lines = WholeLines(decode.id)
        try:
            shown = lines.feed(first)
        except EngineError as error:
            raise LegFailed(decode, error) from error
        streaming = Streaming(attempt, watched, lines, stream.chunks, self.hear)
        rest = streaming.pieces()
        opening.push_async(lambda _kind, _error, _trace: rest.aclose())
        return Reply(stream.content_type, shown, rest, streaming.pouring())

    async def _first(
        self, attempt: Attempt, leg: Leg, sent: Callable[[], None], opening: Opened
    ) -> tuple[Stream, bytes, bool]:
        """Send a decode leg, and wait until its answer has begun well."""
        seconds = attempt.patience.first_token_s if attempt.of.streams else None
        name = leg.instance.id
        async with at_most(seconds, lambda s: EngineTimeout(f"{name} sent no token within {s:g} s")):
            stream = await opening.enter(self.engines.stream(leg, sent=sent))
            return stream, *await begin(leg.instance, stream)

    def hear(self, attempt: Attempt, counted: int | None) -> None:
        """Take in what the decode engine says about its prompt."""
        if counted is not None:
            attempt.counted.decode = counted
            self.compare(attempt, attempt.journey)

    def compare(self, attempt: Attempt, journey: Journey) -> None:
        """Complain when the legs had different prompts. The answer may be on its way: the log and the counters tell."""
        counted, prefill, decode = attempt.counted, journey.prefill, journey.decode
        if not counted.differ or prefill is None or decode is None:
            return
        journey.fault = (
            f"{prefill.instance} counted {counted.prefill} prompt tokens and {decode.instance} {counted.decode}: "
            "they do not make the same prompt of a request"
        )
        for auditor in self.auditors:
            auditor.differed(prefill.instance, decode.instance)
