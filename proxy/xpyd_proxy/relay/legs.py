"""Single legs: sent, timed, watched, and not waited for for ever."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from xpyd_proxy.core.journey import Journey, Visit
from xpyd_proxy.core.model import Answer, Instance, InstanceId
from xpyd_proxy.core.ports import Auditor, Engines, Watcher
from xpyd_proxy.core.retries import LegFailed
from xpyd_proxy.core.sse import WholeLines
from xpyd_proxy.core.usage import prompt_tokens, prompt_tokens_in
from xpyd_proxy.core.verdict import check_prefill
from xpyd_proxy.errors import EngineError, EngineTimeout, OutOfTime, Refused
from xpyd_proxy.relay.attempt import Attempt
from xpyd_proxy.relay.reply import Reply, begin
from xpyd_proxy.relay.waiting import at_most
from xpyd_proxy.relay.watching import Watched, watching

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Legs:
    """Sends legs. What goes wrong with one is raised as LegFailed."""

    engines: Engines
    clock: Callable[[], float]  # seconds; only differences count
    watchers: Sequence[Watcher] = ()
    auditors: Sequence[Auditor] = ()

    async def prefill(self, attempt: Attempt, prefill: Instance, body: bytes, read: Callable[[Answer], T]) -> T:
        """Get the prompt computed; ``read`` takes from the answer what it is good for, or raises."""
        visit = attempt.journey.prefill = Visit(prefill.id)
        with watching(self.watchers, prefill, attempt.request, self.clock) as watched:
            with _failing(prefill), self._timed(visit):
                answer = await self.engines.ask(attempt.leg(prefill, body), timeout_s=attempt.patience.prefill_s)
                check_prefill(prefill.id, answer)
                found = read(answer)
            watched.answered()
        attempt.counted.prefill = prompt_tokens(answer.body)
        self._compare(attempt, attempt.journey)
        return found

    async def decode(
        self, attempt: Attempt, decode: Instance, body: bytes, sent: Callable[[], None], path: str | None = None
    ) -> Reply:
        """Get a good answer from a decode engine; its request stays open as long as the attempt does."""
        visit = attempt.journey.decode = Visit(decode.id)
        seconds = attempt.patience.first_token_s if attempt.of.streams else None
        async with AsyncExitStack() as opening:
            watched = opening.enter_context(watching(self.watchers, decode, attempt.request, self.clock))
            with _failing(decode), self._timed(visit):
                async with at_most(seconds, lambda s: EngineTimeout(f"{decode.id} sent no token within {s:g} s")):
                    leg = attempt.leg(decode, body, path)
                    stream = await opening.enter_async_context(self.engines.stream(leg, sent=sent))
                    first, goes_on = await begin(decode, stream)
            watched.answered()
            reply = Reply(stream.content_type, first)
            if goes_on:
                lines = WholeLines()
                shown = lines.feed(first)
                rest = self._rest(attempt, watched, lines, stream.chunks)
                await opening.enter_async_context(aclosing(rest))
                reply = Reply(stream.content_type, shown, rest)
            if attempt.journey.solo is None:
                self._hear(attempt, prompt_tokens_in(first) if goes_on else prompt_tokens(first))
            attempt.opened.push_async_exit(opening.pop_all())  # nothing is awaited any more: it is ours or theirs
            return reply

    async def _rest(
        self, attempt: Attempt, watched: Watched, lines: WholeLines, chunks: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes]:
        """Pass a stream on as it comes, in whole lines."""
        decode = watched.instance.id
        try:
            while (chunk := await _next(chunks, attempt, decode)) is not None:
                if passing := lines.feed(chunk):
                    _note(watched, lines)  # now, for many clients hang up at an error
                    if attempt.journey.solo is None and attempt.counted.decode is None:
                        self._hear(attempt, prompt_tokens_in(passing))
                    yield passing
            if passing := _last(lines, decode):
                yield passing
            _note(watched, lines)
        except EngineError as error:
            watched.failed(error)
            raise

    def _hear(self, attempt: Attempt, counted: int | None) -> None:
        """Take in what the decode engine says about its prompt."""
        if counted is not None:
            attempt.counted.decode = counted
            self._compare(attempt, attempt.journey)

    def _compare(self, attempt: Attempt, journey: Journey) -> None:
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

    @contextmanager
    def _timed(self, visit: Visit) -> Generator[None]:
        start = self.clock()
        try:
            yield
        finally:
            visit.ms = (self.clock() - start) * 1000


def _note(watched: Watched, lines: WholeLines) -> None:
    if lines.erred:
        watched.failed(EngineError(f"{watched.instance.id} sent an error in its stream"))


def _last(lines: WholeLines, decode: InstanceId) -> bytes:
    """Return what is left of a stream that has ended; raises EngineError when that was not its end."""
    passing, complete = lines.finish()
    if not complete:
        raise EngineError(f"{decode} ended its stream without [DONE]")
    return passing


async def _next(chunks: AsyncIterator[bytes], attempt: Attempt, decode: InstanceId) -> bytes | None:
    """Return the next bytes, or None at the end; raises EngineTimeout or OutOfTime when they take too long."""
    idle, ends_at = attempt.patience.idle_s, attempt.ends_at
    loop = asyncio.get_running_loop()
    times = [when for when in (None if idle is None else loop.time() + idle, ends_at) if when is not None]
    try:
        async with asyncio.timeout_at(min(times, default=None)):
            return await anext(chunks, None)
    except TimeoutError as exc:
        if ends_at is not None and loop.time() >= ends_at:
            total = attempt.patience.total_s(streams=attempt.of.streams)
            raise OutOfTime(f"the stream was not complete within {total:g} s") from exc
        raise EngineTimeout(f"{decode} sent nothing for {idle:g} s") from exc


@contextmanager
def _failing(instance: Instance) -> Generator[None]:
    try:
        yield
    except (EngineError, Refused) as error:
        raise LegFailed(instance, error) from error
