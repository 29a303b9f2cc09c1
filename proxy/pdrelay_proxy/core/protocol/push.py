"""What the router tells a decode engine whose prefill engine writes the KV cache into its memory
(push).

In pull mode the decode engine is told what the prefill engine has answered. In push mode it may be
told before there is an answer: it only needs to know where the prefill engine is, and by which name
both know the request. Where it is stands in every earlier answer of that engine, so the first
request goes to one engine after the other, and from then on both are asked at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from pdrelay_proxy.core.model import Api, InstanceId, PrefillResult, RequestId, TransferId
from pdrelay_proxy.core.protocol import prompt_ids, request_bodies
from pdrelay_proxy.core.raw_json import (
    NULL,
    TRUE,
    Fields,
    NotJson,
    decode,
    decode_whole_floats,
    encode,
    encode_text,
    text,
)
from pdrelay_proxy.core.schemas import (
    Coordinates,
    KvParams,
    PromptIdsAnswer,
    TokensAnswer,
    TransferNaming,
)
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.settings import KvTransferMode

_T = TypeVar("_T")
# What an engine says of itself that is no place to go to: it listens everywhere (RFC 1122,
# 3.2.1.3). One that says localhost listens there alone, so another name would lead to nobody; a
# decode engine on the same machine reaches it.
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::", "[::]", "*"})


class TransferMode(StrEnum):
    """Who moves the KV cache, in an engine's words; a word we do not know is no push."""

    PULL = "pull"
    PUSH = "push"


class EngineMode(StrEnum):
    """How an engine was started."""

    PULL = "pull"
    PUSH = "push"
    AUTO = "auto"  # it can do either, as the router says for each request


_SAID_PUSH: Final = TransferMode.PUSH.value
_TOLD: Final = b"".join(
    [
        b',"remote_request_id":%b,"transfer_id":%b,"transfer_mode":"push"',
        b',"do_remote_prefill":true,"do_remote_decode":false}',
    ]
)
_PULL, _PUSH = TransferMode  # looking a member up takes as long as a call


@dataclass(frozen=True, slots=True)
class TransferPolicy:
    """How the router takes what prefill engines say about their side of a transfer."""

    unsaid: TransferMode  # of an engine that does not say
    accepted: frozenset[TransferMode]
    at_once: bool  # both legs, as soon as the prefill engine is known to push
    fixed: TransferMode | None  # of engines that can do either; None: the router tries both


_EITHER: Final = frozenset(TransferMode)
TRANSFER_POLICIES: Final[Mapping[KvTransferMode, TransferPolicy]] = {
    KvTransferMode.AUTO: TransferPolicy(TransferMode.PULL, _EITHER, at_once=True, fixed=None),
    KvTransferMode.PULL: TransferPolicy(
        TransferMode.PULL, _EITHER, at_once=False, fixed=TransferMode.PULL
    ),
    KvTransferMode.PUSH: TransferPolicy(
        TransferMode.PUSH, frozenset({TransferMode.PUSH}), at_once=True, fixed=TransferMode.PUSH
    ),
}


# The engines put these around our X-Request-Id, and a suffix of their own behind it.
_NAMES: Final[Mapping[Api, str]] = {
    Api.COMPLETIONS: "cmpl-{}-0",
    Api.CHAT: "chatcmpl-{}",
    Api.RESPONSES: "resp_{}_0",  # from the body's request_id
    Api.MESSAGES: "chatcmpl-{}",
    Api.GENERATE: "generate-tokens-{}",
}


def known_as(api: Api, request: RequestId) -> str:
    """Return the name under which vLLM's engines know a request, as far as both have the same."""
    return _NAMES[api].format(request)


def decode_params(
    coordinates: Coordinates, api: Api, request: RequestId, transfer: TransferId
) -> msgspec.Raw:
    """Return what a decode engine is told before its prefill engine has answered."""
    names = encode_text(known_as(api, request)), encode_text(transfer)
    return msgspec.Raw(msgspec.json.encode(coordinates)[:-1] + _TOLD % names)


def handover(
    prefill: InstanceId,
    answer: bytes,
    api: Api,
    request: RequestId,
    manner: TransferPolicy,
    *,
    transfer: TransferId,
    host: str | None = None,
    is_followed: bool = True,
    tells_ids: bool = False,
    reuses: bool = False,
) -> PrefillResult:
    """Read the answer of a prefill engine; ``transfer`` is the name that it was told.

    ``host``: where the router reaches it, and so do decode engines if it names a place where none
    could. ``is_followed``: a decode engine is yet to be told; ``tells_ids``: the engine was asked
    for token ids; ``reuses``: for those of the prompt, and the decode engine shall get them.

    Raises:
        EngineError: it is such that a decode engine would not survive it, or would wait for ever.
    """
    read = prompt_ids.read_with_ids(answer, TokensAnswer) if tells_ids else None
    telling: TokensAnswer | PromptIdsAnswer | None = read
    may_tell_cache = True
    if reuses and not tells_ids:
        telling = with_ids = prompt_ids.read_with_ids(answer, PromptIdsAnswer)
        if with_ids is not None:
            may_tell_cache = (
                with_ids.usage is not None and with_ids.usage.prompt_tokens_details != NULL
            )
    ids = prompt_ids.found_ids(telling) if reuses and telling is not None else NULL
    params, naming, count = request_bodies.kv_params(prefill, answer, telling)
    said = naming or _read(prefill, params, TransferNaming)
    if isinstance(said, KvParams):
        named = said.remote_host
        offer = said.pdrelay_first_token
        looks_back = said.pdrelay_looks_back == TRUE
    else:
        named = _host_in(params)
        fields = decode(params, Fields)
        offer = fields.get("pdrelay_first_token", NULL)
        looks_back = fields.get("pdrelay_looks_back", NULL) == TRUE
    is_replaced = host is not None and named in _EVERYWHERE
    if is_replaced:
        params = msgspec.Raw(encode(decode(params, Fields) | {"remote_host": text(host or "")}))
    mode = manner.unsaid
    if said.transfer_mode is not None:
        mode = _PUSH if said.transfer_mode == _SAID_PUSH else _PULL
    if mode not in manner.accepted:
        raise EngineError(
            f"{prefill} does not push its KV cache, and this router was started with "
            f"--kv-transfer-mode push"
        )
    if mode is _PULL:
        found = PrefillResult(
            params, None, count, None, named if is_replaced else None, offer, read, looks_back, ids
        )
        found.may_tell_cache = may_tell_cache
        return found
    if not _is_same(said.remote_request_id, known_as(api, request)):
        raise EngineError(
            f"{prefill} knows the request by another id than ours: it cannot push to a decode "
            f"engine"
        )
    if is_followed:
        params = msgspec.Raw(encode(decode(params, Fields) | {"transfer_id": text(transfer)}))
    coordinates = _read(prefill, params, Coordinates)
    replaced = named if is_replaced else None
    return PrefillResult(
        params, coordinates, count, transfer, replaced, NULL, read, looks_back, ids
    )


def _host_in(params: msgspec.Raw) -> str:
    try:
        return decode(decode(params, Fields)["remote_host"], str)
    except (NotJson, KeyError):
        return ""  # it is not text, which the decode engine will say


def _read(prefill: InstanceId, params: msgspec.Raw, wanted: type[_T]) -> _T:
    try:
        return decode_whole_floats(params, wanted)
    except NotJson as exc:
        raise EngineError(f"{prefill} answered without usable kv_transfer_params: {exc}") from exc


def _is_same(theirs: str, ours: str) -> bool:
    """Compare names; an engine adds a suffix of its own, which the other one does not know."""
    return theirs == ours or theirs.startswith(f"{ours}-")
