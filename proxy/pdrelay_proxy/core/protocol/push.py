"""The parameters for a decode engine whose prefill engine writes the KV cache into its memory
(push).

In pull mode the decode engine gets the parameters in the prefill engine's answer. In push mode it
can start before there is an answer: it only needs the prefill engine's address, and the name under
which both know the request. Every earlier answer of that engine has its address, so the first
request goes to one engine after the other, and from then on both legs go out at once.
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
# Hosts in an engine's answer that are no destination: it listens on all addresses (RFC 1122,
# 3.2.1.3). An engine that names localhost listens there alone, so no other name would reach it; a
# decode engine on the same machine does.
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::", "[::]", "*"})


class TransferMode(StrEnum):
    """Who moves the KV cache, in an engine's words; an unknown word means pull."""

    PULL = "pull"
    PUSH = "push"


class EngineMode(StrEnum):
    """How an engine was started."""

    PULL = "pull"
    PUSH = "push"
    AUTO = "auto"  # it can do either, as the router decides for each request


_PUSH_WORD: Final = TransferMode.PUSH.value
_DECODE_PARAMS: Final = b"".join(
    [
        b',"remote_request_id":%b,"transfer_id":%b,"transfer_mode":"push"',
        b',"do_remote_prefill":true,"do_remote_decode":false}',
    ]
)
_PULL, _PUSH = TransferMode  # a lookup of an enum's member costs as much as a call


@dataclass(frozen=True, slots=True)
class TransferPolicy:
    """How the router treats what prefill engines report about transfers."""

    unsaid: TransferMode  # of an engine that does not name its mode
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


# Engines put these around our X-Request-Id (``_base_request_id`` in
# vllm/entrypoints/serve/engine/serving.py), and append a suffix of their own.
_NAMES: Final[Mapping[Api, str]] = {
    Api.COMPLETIONS: "cmpl-{}-0",
    Api.CHAT: "chatcmpl-{}",
    Api.RESPONSES: "resp_{}_0",  # from the body's request_id
    Api.MESSAGES: "chatcmpl-{}",
    Api.GENERATE: "generate-tokens-{}",
}


def known_as(api: Api, request: RequestId) -> str:
    """Return the name under which vLLM's engines know a request, without the suffixes that
    differ.
    """
    return _NAMES[api].format(request)


def decode_params(
    coordinates: Coordinates, api: Api, request: RequestId, transfer: TransferId
) -> msgspec.Raw:
    """Return the parameters for a decode engine before its prefill engine has answered."""
    names = encode_text(known_as(api, request)), encode_text(transfer)
    return msgspec.Raw(msgspec.json.encode(coordinates)[:-1] + _DECODE_PARAMS % names)


def handover(
    prefill: InstanceId,
    answer: bytes,
    api: Api,
    request: RequestId,
    policy: TransferPolicy,
    *,
    transfer: TransferId,
    host: str | None = None,
    is_followed: bool = True,
    tells_ids: bool = False,
    reuses: bool = False,
) -> PrefillResult:
    """Read the answer of a prefill engine; ``transfer`` is the transfer id that it was given.

    ``host``: where the router reaches it, which replaces a host that no decode engine could reach.
    ``is_followed``: a decode leg follows; ``tells_ids``: the engine was asked for token ids;
    ``reuses``: for those of the prompt, which go to the decode engine.

    Raises:
        EngineError: a decode engine would crash on it, or would wait for ever.
    """
    tokens_answer = prompt_ids.read_with_ids(answer, TokensAnswer) if tells_ids else None
    answer_with_ids: TokensAnswer | PromptIdsAnswer | None = tokens_answer
    may_tell_cache = True
    if reuses and not tells_ids:
        answer_with_ids = with_ids = prompt_ids.read_with_ids(answer, PromptIdsAnswer)
        if with_ids is not None:
            may_tell_cache = (
                with_ids.usage is not None and with_ids.usage.prompt_tokens_details != NULL
            )
    ids = prompt_ids.ids_in(answer_with_ids) if reuses and answer_with_ids is not None else NULL
    params, naming, count = request_bodies.kv_params(prefill, answer, answer_with_ids)
    naming_params = naming or _read(prefill, params, TransferNaming)
    if isinstance(naming_params, KvParams):
        named_host = naming_params.remote_host
        offer = naming_params.pdrelay_first_token
        looks_back = naming_params.pdrelay_looks_back == TRUE
    else:
        named_host = _host_in(params)
        fields = decode(params, Fields)
        offer = fields.get("pdrelay_first_token", NULL)
        looks_back = fields.get("pdrelay_looks_back", NULL) == TRUE
    is_replaced = host is not None and named_host in _EVERYWHERE
    if is_replaced:
        params = msgspec.Raw(encode(decode(params, Fields) | {"remote_host": text(host or "")}))
    mode = policy.unsaid
    if naming_params.transfer_mode is not None:
        mode = _PUSH if naming_params.transfer_mode == _PUSH_WORD else _PULL
    if mode not in policy.accepted:
        raise EngineError(
            f"{prefill} does not push its KV cache, and this router was started with "
            f"--kv-transfer-mode push"
        )
    if mode is _PULL:
        result = PrefillResult(
            params,
            None,
            count,
            None,
            named_host if is_replaced else None,
            offer,
            tokens_answer,
            looks_back,
            ids,
        )
        result.may_tell_cache = may_tell_cache
        return result
    if not _is_same(naming_params.remote_request_id, known_as(api, request)):
        raise EngineError(
            f"{prefill} knows the request by another id than ours: it cannot push to a decode "
            f"engine"
        )
    if is_followed:
        params = msgspec.Raw(encode(decode(params, Fields) | {"transfer_id": text(transfer)}))
    coordinates = _read(prefill, params, Coordinates)
    replaced = named_host if is_replaced else None
    return PrefillResult(
        params, coordinates, count, transfer, replaced, NULL, tokens_answer, looks_back, ids
    )


def _host_in(params: msgspec.Raw) -> str:
    try:
        return decode(decode(params, Fields)["remote_host"], str)
    except (NotJson, KeyError):
        return ""  # it is not a string, which the decode engine will refuse


def _read(prefill: InstanceId, params: msgspec.Raw, expected: type[_T]) -> _T:
    try:
        return decode_whole_floats(params, expected)
    except NotJson as exc:
        raise EngineError(f"{prefill} answered without usable kv_transfer_params: {exc}") from exc


def _is_same(engine_name: str, own_name: str) -> bool:
    """Compare names; an engine appends a suffix of its own, which other engines do not know."""
    return engine_name == own_name or engine_name.startswith(f"{own_name}-")
