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
from pdrelay_proxy.core.protocol import push, request_bodies, returned_kv
from pdrelay_proxy.core.protocol.disaggregation import PROMPTS
from pdrelay_proxy.core.protocol.first_token import FirstToken, asked_for_token
from pdrelay_proxy.core.protocol.push import TransferPolicy
from pdrelay_proxy.core.protocol.returned_kv import CachedOn
from pdrelay_proxy.core.raw_json import TRUE, Pieces, encode_in_pieces, maybe
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
    shows: bool = False,
    learns: bool = False,
    cached_on: CachedOn | None = None,
    ids: msgspec.Raw | None = None,
    pushes: bool = False,
) -> Pieces:
    """Return the body of a prefill leg.

    ``reuses``: its answer shall tell the tokens of the prompt; ``shows``: the client may see the
    token that it makes. ``learns``: as ``reuses``, for the choice of engines; ``cached_on``: the
    decode engine that may be asked for KV of the prompt; ``ids``: the tokens of a chat's prompt, in
    place of its messages; ``pushes``: the engine can do either, and shall push.
    """
    fields = request_bodies.named(call.api, call.fields, request)
    asked = request_bodies.prefill_fields(call.api, fields, transfer, pushes=pushes)
    if reuses or learns:
        asked["return_token_ids"] = TRUE
    if shows:
        asked.update(asked_for_token(call.fields))
    if cached_on is not None:
        asked["kv_transfer_params"] = returned_kv.naming(asked["kv_transfer_params"], cached_on)
    if ids is not None:
        asked["kv_transfer_params"] = request_bodies.with_ids(asked["kv_transfer_params"], ids)
    return encode_in_pieces(asked, PROMPTS[call.api], call.shared)


def decode_body(
    call: GenerationRequest,
    record: RequestRecord,
    request: RequestId,
    handover: PrefillResult,
    first: FirstToken | None = None,
    *,
    ids: msgspec.Raw | None = None,
) -> Pieces:
    """Return the body of a decode leg that follows its prefill leg.

    ``first``: the token that was shown, behind which it goes on; ``ids``: of the prompt, in place
    of its text or its messages.
    """
    record.push = LegOrder.SEQUENTIAL if handover.coordinates else None
    record.transfer = handover.transfer
    fields = request_bodies.named(call.api, call.fields, request)
    if first is not None:
        asked = first.decode_fields(fields, handover.params)
    elif ids is not None:
        return request_bodies.decode_pieces_with_ids(
            call.api, fields, handover.params, ids, call.shared
        )
    else:
        asked = request_bodies.decode_fields(fields, handover.params)
    return encode_in_pieces(asked, PROMPTS[call.api], call.shared)


def ignore_replaced_host(_prefill: Instance, _said: str) -> None:
    """Tell nobody."""


class LegBodies:
    """Takes from prefill engines' answers what they are good for, and learns where the engines
    are.
    """

    __slots__ = ("_learned", "_looking_back", "_manner", "_models", "_replaced")

    def __init__(
        self,
        learned: PushCoordinates,
        manner: TransferPolicy,
        replaced: Callable[[Instance, str], None] = ignore_replaced_host,
    ) -> None:
        self._learned = learned
        self._manner = manner
        # By model: the prefill engine that has said last that its engines look back.
        self._looking_back: dict[str | None, InstanceId] = {}
        # that engines have named in answers to requests that name none
        self._models: dict[InstanceId, str] = {}
        self._replaced = replaced  # is told of each answer that named an unreachable host

    def take(
        self,
        call: GenerationRequest,
        request: RequestId,
        transfer: TransferId,
        prefill: Instance,
        *,
        told: Coordinates | None,
        answer: bytes,
        reuses: bool,
        tells_ids: bool = False,
        is_auto: bool = False,
    ) -> PrefillResult:
        """Read an answer; ``told``: what the decode engine has been told of the prefill engine
        already.

        ``reuses``: the decode engine shall get the ids of the prompt; ``tells_ids``: the engine was
        asked for token ids, for something else; ``is_auto``: it can do either, so one that is read
        shows nothing of the next request.

        Raises:
            EngineError: a decode engine would not survive it.
            Moved: it is not the engine that the decode engine was told of.
        """
        found = push.handover(
            prefill.id,
            answer,
            call.api,
            request,
            self._manner,
            transfer=transfer,
            host=prefill.address.host,
            is_followed=told is None,
            tells_ids=tells_ids,
            reuses=reuses,
        )
        if found.replaced is not None:
            self._replaced(prefill, found.replaced)
        if found.coordinates is not None or not is_auto:
            self._learned.learn(prefill.id, found.coordinates)
        if told is not None and told != found.coordinates:
            raise Moved(f"{prefill.id} is not the engine that the decode engine was told of")
        return found

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
        """Return the model that an engine has made an answer with; raises NoModelName: it does not
        say.
        """
        said = maybe(answer, NamedAnswer)
        if said is None or not said.model:
            raise NoModelName(f"{prefill} answered without the name of its model")
        self._models[prefill] = said.model
        return said.model

    def forget(self, prefill: InstanceId) -> None:
        """It has failed: what answers next under this address may serve another model."""
        self._models.pop(prefill, None)
