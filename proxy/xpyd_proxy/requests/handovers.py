"""The bodies of the two legs, and what ties them: the prefill engine's answer."""

from collections.abc import Callable
from dataclasses import replace

from xpyd_proxy.core.fleet.push_coordinates import Learned
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.model import Answer, Call, Handover, Instance, Push, RequestId, TransferId
from xpyd_proxy.core.protocol import push, request_bodies
from xpyd_proxy.core.protocol.disaggregation import PROMPTS
from xpyd_proxy.core.protocol.push import Manner
from xpyd_proxy.core.raw_json import Pieces, encode_in_pieces
from xpyd_proxy.core.schemas import Coordinates
from xpyd_proxy.errors import Moved


def prefill_body(call: Call, request: RequestId, transfer: TransferId, *, reuses: bool) -> Pieces:
    """Return the body of a prefill leg; ``reuses``: its answer shall tell the tokens of the prompt."""
    fields = request_bodies.named(call.api, call.fields, request)
    if reuses:
        fields = request_bodies.telling_tokens(call.api, fields)
    asked = request_bodies.prefill_fields(call.api, fields, transfer)
    return encode_in_pieces(asked, PROMPTS[call.api])


def decode_body(call: Call, journey: Journey, request: RequestId, handover: Handover) -> Pieces:
    """Return the body of a decode leg that follows its prefill leg."""
    journey.push = Push.IN_TURN if handover.coordinates else None
    journey.transfer = handover.transfer
    asked = request_bodies.decode_fields(request_bodies.named(call.api, call.fields, request), handover.params)
    return encode_in_pieces(asked, PROMPTS[call.api])


def unheard(_prefill: Instance, _said: str) -> None:
    """Tell nobody."""


class Handovers:
    """Takes from prefill engines' answers what they are good for, and learns where the engines are."""

    __slots__ = ("_learned", "_manner", "_replaced")

    def __init__(self, learned: Learned, manner: Manner, replaced: Callable[[Instance, str], None] = unheard) -> None:
        self._learned = learned
        self._manner = manner
        self._replaced = replaced  # is told of each answer that named an unreachable host

    def take(
        self,
        call: Call,
        request: RequestId,
        transfer: TransferId,
        prefill: Instance,
        *,
        told: Coordinates | None,
        answer: Answer,
        reuses: bool,
    ) -> Handover:
        """Read an answer; ``told``: what the decode engine has been told of the prefill engine already.

        Raises:
            EngineError: a decode engine would not survive it.
            Moved: it is not the engine that the decode engine was told of.
        """
        found = push.handover(
            prefill.id, answer.body, call.api, request, self._manner, transfer=transfer, host=prefill.address.host
        )
        if found.replaced is not None:
            self._replaced(prefill, found.replaced)
        if reuses:
            found = replace(found, params=request_bodies.with_tokens(found.params, answer.body))
        self._learned.learn(prefill.id, found.coordinates)
        if told is not None and told != found.coordinates:
            raise Moved(f"{prefill.id} is not the engine that the decode engine was told of")
        return found
