"""vLLM over HTTP/1.1, by the router's own client."""

from collections.abc import Callable
from functools import partial
from typing import Final, Self

from pdrelay_proxy.core.admission.keys import Outbound
from pdrelay_proxy.core.model import EngineResponse, Headers, Instance, LegRequest
from pdrelay_proxy.core.protocol.fault_table import not_accepted
from pdrelay_proxy.errors import EngineTimeout
from pdrelay_proxy.io.fair_timeout import FairTimeout
from pdrelay_proxy.io.wire.connection_guard import Guard
from pdrelay_proxy.io.wire.engine_tls import EngineTls
from pdrelay_proxy.io.wire.leg_sender import LegSender
from pdrelay_proxy.io.wire.pool import Dial, Pool
from pdrelay_proxy.io.wire.response_handler import ResponseHandler
from pdrelay_proxy.io.wire.whole_response import WholeAnswer
from pdrelay_proxy.settings import Settings

# of an idle connection: vLLM closes it after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE in vllm/envs.py),
# and a request that comes then would be lost
KEEPALIVE_S: Final = 4.0


class WireEngines:
    """Keeps connections to all engines; use it as a context manager.

    It speaks HTTP/1.1 alone, follows no redirect, keeps no cookie, and asks for no compression. It
    writes a request to one connection once, and never repeats it by itself.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        outbound: Outbound | None = None,
        tls: EngineTls | None = None,
        guard: Guard | None = None,
        dial: Dial | None = None,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        self._probe_timeout_s = settings.health_check_timeout_s
        self.pool = Pool(
            keepalive_s=keepalive_s,
            connect_timeout_s=settings.connect_timeout_s,
            tls=tls,
            guard=guard,
            dial=dial,
        )
        # sends requests over the same connections, with a ResponseHandler for each
        self.leg_sender = LegSender(self.pool, outbound or Outbound())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close()

    async def post(self, leg: LegRequest, *, timeout_s: float) -> EngineResponse:
        """Post a leg, and wait at most ``timeout_s`` for the whole answer; after that the
        connection is closed.

        Raises:
            EngineTimeout: the answer did not come in time.
            EngineError: the engine cannot be reached, broke off, or answered with more than 4 MiB.
        """
        return await self._whole(leg.instance, partial(self.leg_sender.post, leg=leg), timeout_s)

    async def models(
        self, instance: Instance, headers: Headers, *, bare: bool = False
    ) -> EngineResponse:
        """Get the engine's list of models, ``bare``: without a key; raises what ``post`` raises."""
        send = partial(
            self.leg_sender.get, instance=instance, path="/v1/models", headers=headers, bare=bare
        )
        return await self._whole(instance, send, self._probe_timeout_s)

    async def _whole(
        self, instance: Instance, send: Callable[[ResponseHandler], None], timeout_s: float
    ) -> EngineResponse:
        call = WholeAnswer(instance.id)
        try:
            async with FairTimeout(timeout_s):
                send(call)
                answer = await call.answer
        except TimeoutError as exc:
            if call.source is None:
                raise not_accepted(instance.id) from exc
            raise EngineTimeout(f"{instance.id} did not answer within {timeout_s:g} s") from exc
        finally:
            if call.complete:
                self.leg_sender.done(call)
            else:
                call.drop()
            del call  # the error refers to this frame, and the call to the error: a reference cycle
        return answer
