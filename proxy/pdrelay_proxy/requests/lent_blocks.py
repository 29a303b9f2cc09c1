"""Has a prefill engine free the blocks of an attempt that no decode engine will read; the client
never waits for it.
"""

from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.model import Instance, LegRequest, PrefillResult, RequestId, TransferId
from pdrelay_proxy.core.protocol.request_bodies import RELEASE_PATH, abandon_body, release_body
from pdrelay_proxy.requests.intake import RequestPlan
from pdrelay_proxy.requests.services import Services

_ENGINES_MOST: Final = 16  # decode engines of which one is asked


class LentBlocks:
    """What the two engines know the blocks by: the attempt's id, and its transfer's."""

    __slots__ = ("_plan", "_request", "_services", "_transfer")

    def __init__(
        self, services: Services, plan: RequestPlan, request: RequestId, transfer: TransferId
    ) -> None:
        self._services = services
        self._plan = plan
        self._request = request
        self._transfer = transfer

    def release(
        self, prefill: Instance, handover: PrefillResult, decodes: Sequence[Instance]
    ) -> None:
        """Free what a prefill engine has answered with; ``decodes``: who may be asked to, the best
        one first.

        What is pushed needs none: the decode engine lends those blocks.
        """
        call = self._plan.call
        if call is None or handover.coordinates is not None:
            return
        body = release_body(call.fields, handover.params)
        legs = [self._leg(decode, body) for decode in decodes[:_ENGINES_MOST]]
        self._services.releaser.release(
            prefill, legs, self._leg(prefill, abandon_body(call.fields, self._transfer))
        )

    def abandon(self, prefill: Instance) -> None:
        """Free what a prefill engine may have leased by now that has failed, or was dropped."""
        call = self._plan.call
        if call is not None:
            self._services.releaser.abandon(
                prefill, self._leg(prefill, abandon_body(call.fields, self._transfer))
            )

    def _leg(self, engine: Instance, body: bytes) -> LegRequest:
        headers = (*self._plan.headers_for(engine), (b"x-request-id", self._request.encode()))
        return LegRequest(engine, RELEASE_PATH, body, headers)
