"""A stream that goes on when its engine does not: another decode engine takes over."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from xpyd_proxy.core.raw_json import Fields
from xpyd_proxy.core.replay import Replay
from xpyd_proxy.errors import EngineError, ProxyError
from xpyd_proxy.relay.reply import Reply

# Closes what is left of a broken stream and gets another engine's; raises ProxyError if there is none.
TakeOver = Callable[[Fields], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Resuming:
    """One stream over as many engines as it takes, up to a limit."""

    replay: Replay
    take_over: TakeOver
    times: int  # how often another engine may take over

    def of(self, reply: Reply) -> Reply:
        """Return the reply as the client gets it."""
        if reply.rest is None:
            return reply
        return Reply(reply.content_type, self.replay.feed(reply.body), self._rest(reply.rest))

    async def _rest(self, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        left = self.times
        while True:
            try:
                async for lines in self._pass(rest):
                    yield lines
            except EngineError as error:
                if (ending := self.replay.ending()) is not None:
                    yield self.replay.gap() + ending
                    return
                reply = await self._another(error, left)
                if reply.rest is None:  # it is no stream, whatever else it is
                    raise
            else:
                return
            left -= 1
            if lines := self.replay.gap() + self.replay.feed(reply.body):
                yield lines
            rest = reply.rest

    async def _pass(self, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Pass on what the client may see; an error that the engine sends in its stream is one more way to break."""
        if not self.replay.broken:
            async for lines in rest:
                if shown := self.replay.feed(lines):
                    yield shown
                if self.replay.broken:
                    break
        if self.replay.broken:
            raise EngineError("the engine sent an error in its stream")

    async def _another(self, error: EngineError, left: int) -> Reply:
        """Have another engine take over; the client is told of the first failure if that fails, too."""
        fields = self.replay.again() if left > 0 else None
        if fields is None:
            raise error
        try:
            return await self.take_over(fields)
        except ProxyError:
            raise error from None
