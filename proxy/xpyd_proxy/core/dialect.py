"""How one client request becomes two engine requests.

The prefill engine computes the prompt and stops after one token; its answer carries ``kv_transfer_params``, which go
to the decode engine as they are. Only the names of a body's fields are decoded. The values stay the client's own
bytes, so that floats, big integers, escapes and fields of tomorrow arrive as they were sent. When a name occurs twice
the last value counts, as it does in vLLM, and only that one is sent on: both engines see the same request.
"""

from typing import Final

import msgspec

from xpyd_proxy.core.model import Api, InstanceId, TransferId
from xpyd_proxy.core.raw_json import NULL, Fields, NotJson, OtherJson, decode, encode, text
from xpyd_proxy.errors import BadRequest, EngineError

_TRUE: Final = msgspec.Raw(b"true")
_ONE: Final = msgspec.Raw(b"1")
_FALSE: Final = msgspec.Raw(b"false")
_ASK_FOR_PREFILL: Final[Fields] = {"do_remote_decode": _TRUE, "do_remote_prefill": _FALSE} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"), NULL
)

# Only the router may set these: from a client they name memory that is not the client's, or kill the engine.
_PRIVATE: Final = ("kv_transfer_params", "ec_transfer_params")
# They shape the tokens that decode makes, or the way it shows them; prefill shows its one token to nobody.
_ONLY_FOR_DECODE: Final = frozenset(
    {"stream_options", "best_of", "use_beam_search", "prompt_logprobs", "logprobs", "top_logprobs", "logprob_token_ids"}
)
_LIMITS: Final = {Api.COMPLETIONS: ("max_tokens",), Api.CHAT: ("max_tokens", "max_completion_tokens")}
# Without one of these vLLM 0.32 dies on an assertion or a KeyError, and with it every request it serves.
_NEEDED: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")


class _PrefillAnswer(msgspec.Struct):
    """What we read of a prefill engine's answer."""

    kv_transfer_params: msgspec.Raw = NULL


def parse(body: bytes, *, strip_private: bool) -> Fields:
    """Read a client's body, and refuse (or strip) the parameters only the router may set.

    Raises:
        BadRequest: the body is not a JSON object, or carries such parameters.
    """
    try:
        fields = decode(body, Fields)
    except OtherJson as exc:
        raise BadRequest("the body is JSON, but not an object") from exc
    except NotJson as exc:
        raise BadRequest(f"the body is not JSON: {exc}") from exc
    fields = _public(fields, strip_private=strip_private, inside="")
    # vLLM merges vllm_xargs into the place where it looks for the KV parameters.
    if (extra := fields.get("vllm_xargs")) is not None:
        fields["vllm_xargs"] = _public_extra(extra, strip_private=strip_private)
    return fields


def prefill_body(api: Api, fields: Fields, transfer: TransferId) -> bytes:
    """Ask for the KV cache of the prompt: everything that shapes the prompt, and one token.

    The name of the transfer goes along in any case: whether the engine pushes is known from its answer.
    """
    kept = {name: value for name, value in fields.items() if name not in _ONLY_FOR_DECODE}
    if kept.get("n", NULL) != NULL:
        kept["n"] = _ONE
    kept.update(dict.fromkeys(_LIMITS[api], _ONE))
    kept["min_tokens"] = _ONE  # an end-of-sequence as first token would end the request another way than by length
    kept["stream"] = _FALSE  # a streamed answer carries no kv_transfer_params
    kept["kv_transfer_params"] = msgspec.Raw(encode(_ASK_FOR_PREFILL | {"transfer_id": text(transfer)}))
    return encode(kept)


def decode_body(fields: Fields, kv_params: msgspec.Raw) -> bytes:
    """Ask for the tokens: the client's request, and where the KV cache of its prompt is."""
    return encode(fields | {"kv_transfer_params": kv_params})


def kv_params(prefill: InstanceId, answer: bytes) -> msgspec.Raw:
    """Take the KV parameters out of a prefill engine's answer, unread but checked.

    Raises:
        EngineError: they are missing, or such that a decode engine would not survive them.
    """
    try:
        found = decode(answer, _PrefillAnswer).kv_transfer_params
        params = decode(found, Fields)
        missing = [name for name in _NEEDED if _is_empty(params.get(name, NULL))]
    except NotJson as exc:
        raise EngineError(f"{prefill} answered without usable kv_transfer_params") from exc
    if params.get("do_remote_prefill") != _TRUE:
        raise EngineError(f"{prefill} kept no KV cache for this request: do_remote_prefill is not true")
    if missing:
        raise EngineError(f"{prefill} left out of its kv_transfer_params: {', '.join(missing)}")
    return found


def _is_empty(value: msgspec.Raw) -> bool:
    """Tell null and the like: an empty list of blocks kills an engine as none does. A port may be 0."""
    return decode(value, object) in (None, "", [])


def _public(fields: Fields, *, strip_private: bool, inside: str) -> Fields:
    """Drop the private parameters; complain about those that say something unless told to strip them."""
    for name in _PRIVATE:
        if fields.pop(name, NULL) != NULL and not strip_private:
            message = f"{inside}{name} is set by the router and must not be part of a request"
            raise BadRequest(message, param=f"{inside}{name}")
    return fields


def _public_extra(extra: msgspec.Raw, *, strip_private: bool) -> msgspec.Raw:
    try:
        fields = decode(extra, Fields)
    except OtherJson:
        return extra  # not an object: null, or something the engine refuses
    except NotJson as exc:
        raise BadRequest(f"vllm_xargs is not JSON: {exc}", param="vllm_xargs") from exc
    if not fields.keys() & set(_PRIVATE):
        return extra
    return msgspec.Raw(encode(_public(fields, strip_private=strip_private, inside="vllm_xargs.")))
