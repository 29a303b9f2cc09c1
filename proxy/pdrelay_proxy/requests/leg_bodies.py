"""The bodies of the two legs, and what ties them: the prefill engine's answer."""

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.model import (
    GenerationRequest,
    Instance,
    InstanceId,
    LegOrder,
    PrefillResult,
    RequestId,
    TransferId,
)
from pdrelay_proxy.core.protocol import prefill_answer, push, request_bodies, returned_kv
from pdrelay_proxy.core.protocol.disaggregation import PROMPTS
from pdrelay_proxy.core.protocol.push import TransferPolicy
from pdrelay_proxy.core.protocol.returned_kv import CachedOn
from pdrelay_proxy.core.protocol.stream_opening import Opening
from pdrelay_proxy.core.raw_json import TRUE, Fields, Pieces, encode_in_pieces, maybe
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.core.schemas import Coordinates, NamedAnswer
from pdrelay_proxy.errors import Moved, NoModelName

_LOOKS_BACK: Final = (
    "%s has defaults of its own that look back at the tokens made so far (presence_penalty, "
    "frequency_penalty or "
    "max_new_tokens of its generation config, or logits processors): streams%s are neither resumed "
    "nor moved"
)

logger = logging.getLogger(__name__)


def prefill_body(
    call: GenerationRequest,
    request: RequestId,
    transfer: TransferId,
    *,
    reuses: bool,
    learns: bool = False,
    own_fields: Fields | None = None,
    cached_on: CachedOn | None = None,
    ids: msgspec.Raw | None = None,
    pushes: bool = False,
) -> Pieces:
    """Return the body of a prefill leg.

    ``reuses``: its answer shall tell the tokens of the prompt; ``learns``: the same, for the choice
    of engines. ``own_fields``: what the engine is asked beside its usual leg; ``cached_on``: the
    decode engine that may be asked for KV of the prompt; ``ids``: the tokens of a chat's prompt, in
    place of its messages; ``pushes``: the engine can do either, and shall push.
    """
    fields = request_bodies.named(call.api, call.fields, request)
    leg_fields = request_bodies.prefill_fields(call.api, fields, transfer, pushes=pushes)
    if reuses or learns:
        leg_fields["return_token_ids"] = TRUE
    if own_fields is not None:
        leg_fields.update(own_fields)
    if cached_on is not None:
        leg_fields["kv_transfer_params"] = returned_kv.naming(
            leg_fields["kv_transfer_params"], cached_on
        )
    if ids is not None:
        leg_fields["kv_transfer_params"] = request_bodies.with_ids(
            leg_fields["kv_transfer_params"], ids
        )
    return encode_in_pieces(leg_fields, PROMPTS[call.api], call.shared)


def pushed_body(
    call: GenerationRequest, request: RequestId, transfer: TransferId, coordinates: Coordinates
) -> Pieces:
    """Return the body of a decode leg that does not wait for its prefill leg."""
    fields = request_bodies.named(call.api, call.fields, request)
    params = push.decode_params(coordinates, call.api, request, transfer)
    leg_fields = request_bodies.decode_fields(fields, params)
    return encode_in_pieces(leg_fields, PROMPTS[call.api], call.shared)


def decode_body(
    call: GenerationRequest,
    record: RequestRecord,
    request: RequestId,
    handover: PrefillResult,
    opening: Opening | None = None,
    *,
    ids: msgspec.Raw | None = None,
) -> Pieces:
    """Return the body of a decode leg that follows its prefill leg.

    ``opening``: what the client has of its stream; ``ids``: of the prompt, in place of its text or
    its messages.
    """
    record.push = LegOrder.SEQUENTIAL if handover.coordinates else None
    record.transfer = handover.transfer
    fields = request_bodies.named(call.api, call.fields, request)
    if opening is not None:
        leg_fields = opening.decode_fields(fields, handover.params)
    elif ids is not None:
        return request_bodies.decode_pieces_with_ids(
            call.api, fields, handover.params, ids, call.shared
        )
    else:
        leg_fields = request_bodies.decode_fields(fields, handover.params)
    return encode_in_pieces(leg_fields, PROMPTS[call.api], call.shared)


class LegBodies:
    """Takes what is of use from prefill engines' answers, and learns where they are."""

    __slots__ = ("_learned", "_looking_back", "_models", "_policy", "_replaced")

    def __init__(
        self,
        learned: PushCoordinates,
        policy: TransferPolicy,
        replaced: Callable[[Instance, str], None],
    ) -> None:
        self._learned = learned
        self._policy = policy
        # By model: the prefill engine that has said last that its engines look back.
        self._looking_back: dict[str | None, InstanceId] = {}
        # that engines have named in answers to requests that name none
        self._models: dict[InstanceId, str] = {}
        self._replaced = replaced  # is told of each answer that named an unreachable host

    def read_handover(
        self,
        call: GenerationRequest,
        request: RequestId,
        transfer: TransferId,
        prefill: Instance,
        *,
        sent: Coordinates | None,
        answer: bytes,
        reuses: bool,
        tells_ids: bool = False,
        is_auto: bool = False,
    ) -> PrefillResult:
        """Read an answer; ``sent``: what the decode engine has been told of the prefill engine
        already.

        ``reuses``: the decode engine shall get the ids of the prompt; ``tells_ids``: the engine was
        asked for token ids, for something else; ``is_auto``: it can do either, so one that is read
        shows nothing of the next request.

        Raises:
            EngineError: a decode engine would not survive it.
            Moved: it is not the engine that the decode engine was told of.
        """
        result = prefill_answer.handover(
            prefill.id,
            answer,
            call.api,
            request,
            self._policy,
            transfer=transfer,
            host=prefill.address.host,
            is_followed=sent is None,
            tells_ids=tells_ids,
            reuses=reuses,
        )
        if result.replaced is not None:
            self._replaced(prefill, result.replaced)
        if result.coordinates is not None or not is_auto:
            self._learned.learn(prefill.id, result.coordinates)
        if sent is not None and sent != result.coordinates:
            raise Moved(f"{prefill.id} is not the engine that the decode engine was told of")
        return result

    def note_looks_back(self, model: str | None, prefill: InstanceId, *, looks_back: bool) -> None:
        """Remember whether engines of a model look back at the tokens made so far, by defaults of
        their own.

        Another engine would begin these anew. One that does not say so any more takes back its own
        word alone.
        """
        if looks_back:
            if model not in self._looking_back:
                logger.warning(_LOOKS_BACK, prefill, "" if model is None else f" of {model}")
            self._looking_back[model] = prefill
        elif self._looking_back.get(model) == prefill:
            del self._looking_back[model]

    def look_back(self, model: str | None, engine: Callable[[InstanceId], object]) -> bool:
        """Tell whether a stream of this model has to end where it began; ``engine``: finds one,
        None if it is gone.
        """
        said_by = self._looking_back.get(model)
        if said_by is None:
            return False
        if engine(said_by) is None:
            del self._looking_back[model]
            return False
        return True

    def model_of(self, prefill: InstanceId) -> str | None:
        """Return the model that an engine has named last; None: it was not asked."""
        return self._models.get(prefill)

    def learn_model(self, prefill: InstanceId, answer: bytes) -> str:
        """Return the model of an engine's answer; raises NoModelName: it does not say."""
        named = maybe(answer, NamedAnswer)
        if named is None or not named.model:
            raise NoModelName(f"{prefill} answered without the name of its model")
        self._models[prefill] = named.model
        return named.model

    def forget(self, prefill: InstanceId) -> None:
        """It has failed: what answers next under this address may serve another model."""
        self._models.pop(prefill, None)
