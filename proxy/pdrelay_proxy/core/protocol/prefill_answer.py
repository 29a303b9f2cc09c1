"""What a prefill engine's answer is good for: its KV parameters, checked, and what else it tells.

The parameters go to the decode engine undecoded, but for what only the router can know.
"""

from typing import Final, TypeAlias, TypeVar

import msgspec

from pdrelay_proxy.core.model import Api, InstanceId, PrefillResult, RequestId, TransferId
from pdrelay_proxy.core.protocol import prompt_ids
from pdrelay_proxy.core.protocol.push import TransferMode, TransferPolicy, known_as
from pdrelay_proxy.core.protocol.usage import counted, prompt_of
from pdrelay_proxy.core.raw_json import (
    NULL,
    TRUE,
    Fields,
    NotJson,
    decode,
    decode_whole_floats,
    maybe,
    to_raw,
)
from pdrelay_proxy.core.schemas import (
    Coordinates,
    KvParams,
    PlainPrefillAnswer,
    PrefillAnswer,
    PromptIdsAnswer,
    TokensAnswer,
    TransferNaming,
)
from pdrelay_proxy.errors import EngineError, NoKvParams

_T = TypeVar("_T")
_AnswerWithIds: TypeAlias = TokensAnswer | PromptIdsAnswer
# Hosts in an engine's answer that are no destination: it listens on all addresses (RFC 1122,
# 3.2.1.3). An engine that names localhost listens there alone, so no other name would reach it; a
# decode engine on the same machine does.
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::", "[::]", "*"})
# Without one of these vLLM 0.32 dies on an assertion or a KeyError, with all of its requests
# (vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py).
_NEEDED: Final = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
)
_BRACKET: Final = 91
_CLOSING: Final = 93
_SPACE: Final = 32  # no white space byte is above it
_PULL: Final = TransferMode.PULL
_PUSH: Final = TransferMode.PUSH
_PUSH_WORD: Final = TransferMode.PUSH.value


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
    parsed: _AnswerWithIds | None = None
    if tells_ids:
        parsed = prompt_ids.read_with_ids(answer, TokensAnswer)
    elif reuses:
        parsed = prompt_ids.read_with_ids(answer, PromptIdsAnswer)
    params, known, count = kv_params(prefill, answer, parsed)
    naming: TransferNaming
    if known is not None:
        naming = known
        named_host = known.remote_host
        offer = known.pdrelay_first_token
        looks_back = known.pdrelay_looks_back == TRUE
    else:
        naming = _read(prefill, params, TransferNaming)
        fields = decode(params, Fields)
        # what is not a string the decode engine will refuse
        named_host = maybe(fields.get("remote_host", NULL), str) or ""
        offer = fields.get("pdrelay_first_token", NULL)
        looks_back = fields.get("pdrelay_looks_back", NULL) == TRUE
    replaced: str | None = None
    if host is not None and named_host in _EVERYWHERE:
        replaced = named_host
        params = to_raw(decode(params, Fields) | {"remote_host": to_raw(host)})
    word = naming.transfer_mode
    mode = policy.unsaid if word is None else _PUSH if word == _PUSH_WORD else _PULL
    if mode not in policy.accepted:
        raise EngineError(
            f"{prefill} does not push its KV cache, and this router was started with "
            f"--kv-transfer-mode push"
        )
    coordinates: Coordinates | None = None
    pushed: TransferId | None = None
    if mode is _PUSH:
        if not _is_same(naming.remote_request_id, known_as(api, request)):
            raise EngineError(
                f"{prefill} knows the request by another id than ours: it cannot push to a decode "
                f"engine"
            )
        if is_followed:
            params = to_raw(decode(params, Fields) | {"transfer_id": to_raw(transfer)})
        coordinates = _read(prefill, params, Coordinates)
        pushed = transfer
        offer = NULL
    result = PrefillResult(
        params,
        coordinates,
        count,
        pushed,
        replaced,
        offer,
        parsed if isinstance(parsed, TokensAnswer) else None,
        looks_back,
        prompt_ids.ids_in(parsed) if reuses and parsed is not None else NULL,
    )
    if isinstance(parsed, PromptIdsAnswer):
        usage = parsed.usage
        result.may_tell_cache = usage is not None and usage.prompt_tokens_details != NULL
    return result


def kv_params(
    prefill: InstanceId, answer: bytes, parsed: _AnswerWithIds | None = None
) -> tuple[msgspec.Raw, KvParams | None, int | None]:
    """Return the KV parameters of a prefill engine's answer, checked and undecoded; their typed
    form, if they are as usual; and the prompt's tokens, if known.

    ``parsed``: the answer, if it was parsed before.

    Raises:
        EngineError: they are missing, or a decode engine would crash on them.
    """
    try:
        raw_params, count = _params_and_count(answer, parsed)
        if (known_params := _as_usual(raw_params)) is not None:
            return raw_params, known_params, count
        if raw_params == NULL:
            raise NoKvParams(
                f"{prefill} answered without kv_transfer_params: it keeps no KV cache for this "
                f"request"
            )
        params = decode(raw_params, Fields)
        missing = [name for name in _NEEDED if _is_empty(params.get(name, NULL))]
    except NotJson as exc:
        raise EngineError(f"{prefill} answered without usable kv_transfer_params") from exc
    if params.get("do_remote_prefill") != TRUE:
        raise NoKvParams(
            f"{prefill} kept no KV cache for this request: do_remote_prefill is not true"
        )
    if missing:
        raise EngineError(f"{prefill} left out of its kv_transfer_params: {', '.join(missing)}")
    return raw_params, None, count


def _params_and_count(
    answer: bytes, parsed: _AnswerWithIds | None
) -> tuple[msgspec.Raw, int | None]:
    """Return the KV parameters, null if there are none, and the prompt's tokens; raises NotJson."""
    if isinstance(parsed, TokensAnswer):
        count = None if parsed.usage is None else counted(to_raw(parsed.usage))
        return parsed.kv_transfer_params, count
    plain = maybe(answer, PlainPrefillAnswer) if parsed is None else parsed
    if plain is not None:
        return plain.kv_transfer_params, None if plain.usage is None else prompt_of(plain.usage)
    other = decode(answer, PrefillAnswer)
    return other.kv_transfer_params, counted(other.usage)


def _as_usual(params: msgspec.Raw) -> KvParams | None:
    """Return parameters in the form that all engines send; None: others may be valid as well, and
    need a closer check.
    """
    params_read = maybe(params, KvParams)
    return (
        None
        if params_read is None
        or not params_read.do_remote_prefill
        or _is_empty(params_read.remote_block_ids)
        else params_read
    )


def _is_empty(value: msgspec.Raw) -> bool:
    """Return whether a value is null or empty: an empty list of blocks crashes an engine as null
    does.

    A port may be 0.
    """
    text = bytes(value)
    if len(text) > 1 and text[0] == _BRACKET and text[1] > _SPACE and text[1] != _CLOSING:
        return False
    if text.startswith(b"[") and text.isascii():
        return text[1:].lstrip(b" \t\n\r").startswith(b"]")  # without decoding a long list
    return decode(text, object) in (None, "", [])


def _read(prefill: InstanceId, params: msgspec.Raw, expected: type[_T]) -> _T:
    try:
        return decode_whole_floats(params, expected)
    except NotJson as exc:
        raise EngineError(f"{prefill} answered without usable kv_transfer_params: {exc}") from exc


def _is_same(engine_name: str, own_name: str) -> bool:
    """Compare names; an engine appends a suffix of its own, which other engines do not know."""
    return engine_name == own_name or engine_name.startswith(f"{own_name}-")
