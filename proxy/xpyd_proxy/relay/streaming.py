"""The stream behind its first event: passed on as it comes, in whole lines, and not waited for for ever."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from xpyd_proxy.core.ports import Delivery, delivery_of
from xpyd_proxy.core.sse import WholeLines
from xpyd_proxy.core.usage import prompt_tokens_in
from xpyd_proxy.errors import EngineError, EngineTimeout, OutOfTime
from xpyd_proxy.relay.attempt import Attempt
from xpyd_proxy.relay.watching import Watched


class Streaming:
    """One stream: read ``pieces`` one by one, or have them poured; not both."""

    __slots__ = ("_attempt", "_chunks", "_hear", "_lines", "_listens", "_watched")

    def __init__(
        self,
        attempt: Attempt,
        watched: Watched,
        lines: WholeLines,
        chunks: AsyncIterator[bytes],
        hear: Callable[[Attempt, int | None], None],
    ) -> None:
        self._attempt = attempt
        self._watched = watched
        self._lines = lines
        self._chunks = chunks
        self._hear = hear
        self._listens = attempt.journey.solo is None  # to what is said about the prompt, until it has been said

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield what may pass; raises EngineError when the engine breaks off, OutOfTime when time does."""
        try:
            while (chunk := await self._next()) is not None:
                if passing := self.passing(chunk):
                    yield passing
            if passing := self.last():
                yield passing
        except EngineError as error:
            self._watched.failed(error)
            raise

    def pouring(self) -> "Pouring | None":
        """Return what pours the stream, if its engine's client can."""
        delivery = delivery_of(self._chunks)
        return None if delivery is None else Pouring(self, self._attempt, self._watched, delivery)

    def passing(self, chunk: bytes) -> bytes:
        """Take what has come, and return what may pass now."""
        passing = self._lines.feed(chunk)
        if passing:
            if self._lines.erred:
                self._note()  # now, for many clients hang up at an error
            if self._listens and self._attempt.counted.decode is None:
                self._hear(self._attempt, prompt_tokens_in(passing))
        return passing

    def last(self) -> bytes:
        """Return what is left of a stream that has ended; raises EngineError when that was not its end."""
        passing, complete = self._lines.finish()
        if not complete:
            raise EngineError(f"{self._watched.instance.id} ended its stream without [DONE]")
        self._note()
        return passing

    def late(self, when: float | None) -> EngineTimeout | OutOfTime:
        """Say what has taken too long, by the limit that was reached and not by the clock: a timer may be early."""
        attempt = self._attempt
        if attempt.ends_at is not None and attempt.ends_at == when:
            total = attempt.patience.total_s(streams=attempt.of.streams)
            return OutOfTime(f"the stream was not complete within {total:g} s")
        return EngineTimeout(f"{self._watched.instance.id} sent nothing for {attempt.patience.idle_s:g} s")

    def _note(self) -> None:
        if self._lines.erred:
            self._watched.failed(EngineError(f"{self._watched.instance.id} sent an error in its stream"))

    async def _next(self) -> bytes | None:
        """Return the next bytes, or None at the end; raises EngineTimeout or OutOfTime when they take too long."""
        when = due(self._attempt, asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout_at(when):
                return await anext(self._chunks, None)
        except TimeoutError as exc:
            raise self.late(when) from exc


def due(attempt: Attempt, heard: float) -> float | None:
    """Return when it is too late for an engine that was heard then, on the event loop's clock; None: never."""
    idle, ends_at = attempt.patience.idle_s, attempt.ends_at
    if idle is None:
        return ends_at
    return heard + idle if ends_at is None else min(heard + idle, ends_at)


class Pouring:
    """Hands a stream to its client inside the event loop's read: no wake-up, no timer and no task for each piece.

    There is one timer for all of the stream. When it goes off it looks when the engine was heard last, and goes on to
    the time when that would be too long ago.
    """

    __slots__ = (
        "_attempt",
        "_delivery",
        "_expired",
        "_heard",
        "_loop",
        "_paused",
        "_sink",
        "_stream",
        "_task",
        "_timer",
        "_watched",
    )

    _loop: asyncio.AbstractEventLoop  # these since it began
    _task: asyncio.Task[object] | None
    _sink: Callable[[bytes], object]

    def __init__(self, stream: Streaming, attempt: Attempt, watched: Watched, delivery: Delivery) -> None:
        self._stream = stream
        self._attempt = attempt
        self._watched = watched
        self._delivery = delivery
        self._timer: asyncio.TimerHandle | None = None
        self._heard = 0.0  # when, on the event loop's clock
        self._paused = False  # the client is slow, which is not held against the engine
        self._expired: float | None = None  # the limit that was reached

    async def into(self, sink: Callable[[bytes], object]) -> None:
        """Call ``sink`` with all that may pass; raises what ``pieces`` raises."""
        self._sink, self._loop = sink, asyncio.get_running_loop()
        self._task = asyncio.current_task(self._loop)
        try:
            await self._deliver()
            if passing := self._stream.last():
                sink(passing)
        except EngineError as error:
            self._watched.failed(error)
            raise

    def pause(self) -> None:
        """Let the engine wait: the client cannot take more now."""
        self._paused = True
        self._delivery.pause()

    def resume(self) -> None:
        """Go on; the engine has its full time again."""
        self._paused = False
        self._heard = self._loop.time()
        if self._timer is None:
            self._look_again()
        self._delivery.resume()

    async def _deliver(self) -> None:
        before = 0 if self._task is None else self._task.cancelling()
        self._heard = self._loop.time()
        self._look_again()
        try:
            await self._delivery.deliver(self._pass)
        except asyncio.CancelledError as exc:
            if self._expired is None or self._task is None or self._task.uncancel() > before:
                raise
            raise self._stream.late(self._expired) from exc
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _pass(self, chunk: bytes) -> None:
        self._heard = self._loop.time()
        if passing := self._stream.passing(chunk):
            self._sink(passing)

    def _look_again(self) -> None:
        when = due(self._attempt, self._heard)
        self._timer = None if when is None else self._loop.call_at(when, self._look)

    def _look(self) -> None:
        """Give up an engine that was not heard for too long."""
        self._timer = None
        when = due(self._attempt, self._heard)
        if self._paused or when is None:
            return
        if self._loop.time() < when:
            self._look_again()
        elif self._task is not None:
            self._expired = when
            self._task.cancel()
