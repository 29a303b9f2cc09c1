"""Makes the two engine requests of a client's request.

The prefill engine computes the prompt and stops after one token; its answer has
``kv_transfer_params``, which go to the decode engine unchanged. Only the names of a body's fields
are decoded. The values stay the client's own bytes, so that floats, big integers, escapes and
unknown fields arrive as they were sent. When a name occurs twice the last value counts, as it does
in vLLM, and only that one is sent on: both engines see the same request.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pdrelay_proxy.core.http.json_bounds import SMALL, check_names, check_prompts
from pdrelay_proxy.core.model import Api, InstanceId, RequestId, TransferId
from pdrelay_proxy.core.protocol.usage import counted, prompt_of
from pdrelay_proxy.core.raw_json import (
    FALSE,
    LONG,
    NULL,
    TRUE,
    Fields,
    NotJson,
    OtherJson,
    Pieces,
    decode,
    encode,
    encode_in_pieces,
    maybe,
    text,
)
from pdrelay_proxy.core.schemas import (
    KvParams,
    PlainPrefillAnswer,
    PrefillAnswer,
    PromptIdsAnswer,
    TokensAnswer,
    TransferNaming,
)
from pdrelay_proxy.errors import BadRequest, EngineError, NoKvParams

_RESPONSES: Final = Api.RESPONSES  # a lookup of an enum's member costs as much as a call
_COMPLETIONS: Final = Api.COMPLETIONS
_GENERATE: Final = Api.GENERATE
_ONE: Final = msgspec.Raw(b"1")
_ANY_PROMPT: Final = msgspec.Raw(b"[0]")
_TOO_MANY: Final = msgspec.Raw(b"2147483647")
_ASK_FOR_PREFILL: Final[Fields] = {
    "do_remote_decode": TRUE,
    "do_remote_prefill": FALSE,
} | dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"), NULL)
# the router's own id: nothing to escape
_ASKING: Final = encode(_ASK_FOR_PREFILL)[:-1] + b',"transfer_id":"%b"}'

_ASKING_PUSH: Final = _ASKING[:-1] + b',"transfer_mode":"push"}'

_ABANDONING: Final = (
    b'{"do_remote_decode":false,"do_remote_prefill":false,"abandoned_transfer_id":%b}'
)
_BRACKET: Final = 91
_CLOSING: Final = 93
_SPACE: Final = 32  # no white space byte is above it

# of GENERATE: an object with the fields that other calls have beside the prompt
SAMPLING: Final = "sampling_params"
_EXTRA: Final = "extra_args"

# Only the router may set these: from a client they would name memory of other requests, or crash
# the engine.
_PRIVATE: Final = ("kv_transfer_params", "ec_transfer_params")
# "full" makes vLLM 0.32 publish every cached block that a request uses again
# (vllm/v1/core/kv_cache_manager.py): a client could flood all routers that follow the engine's
# events. The answer is the same without it.
_REPORT_MODE: Final = "kv_cache_report_mode"
_NOT_IN_EXTRA: Final = frozenset({*_PRIVATE, _REPORT_MODE})
_TEMPLATE: Final = "chat_template"
_TEMPLATE_KWARGS: Final = "chat_template_kwargs"
TEMPLATES: Final = frozenset({_TEMPLATE, _TEMPLATE_KWARGS})
# They shape the tokens that decode generates, or their form in the answer; no client sees the token
# of prefill.
_OPENAI: Final = frozenset(
    {
        "stream_options",
        "best_of",
        "use_beam_search",
        "prompt_logprobs",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
    }
)
_ONLY_FOR_DECODE: Final[Mapping[Api, frozenset[str]]] = {
    Api.COMPLETIONS: _OPENAI,
    Api.CHAT: _OPENAI,
    Api.RESPONSES: frozenset(),
    Api.MESSAGES: frozenset(),
    Api.GENERATE: frozenset({"stream_options"}),
}
# An end-of-sequence as first token would give another finish reason than length; not every API can
# rule it out.
_ONE_TOKEN: Final[Mapping[Api, Fields]] = {
    Api.COMPLETIONS: dict.fromkeys(("max_tokens", "min_tokens"), _ONE),
    Api.CHAT: dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), _ONE),
    # no client fetches the prefill engine's answer
    Api.RESPONSES: {"max_output_tokens": _ONE, "store": FALSE},
    Api.MESSAGES: {"max_tokens": _ONE},
    Api.GENERATE: {},  # its limits are in the sampling parameters
}
_NO_NAME: Final = (b"null", b'""')
_SAMPLED_ONCE: Final[Fields] = dict.fromkeys(("max_tokens", "min_tokens"), _ONE)
# Without one of these vLLM 0.32 dies on an assertion or a KeyError, with all of its requests
# (vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py).
_NEEDED: Final = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
)


def parse(body: bytes) -> Fields:
    """Parse a client's body, and refuse the parameters that only the router may set.

    ``kv_cache_report_mode`` is dropped from vLLM's extra arguments.

    Raises:
        BadRequest: the body is not a JSON object, has such parameters, or has too many names or
            prompts.
    """
    is_small = len(body) <= SMALL
    if not is_small:
        check_names(body)
    try:
        if not body.isascii():
            body.decode()  # msgspec decodes no values here, and vLLM would answer in FastAPI's format
        fields = decode(body, Fields)
    except (NotJson, UnicodeDecodeError) as exc:
        fields = _otherwise_encoded(body, exc)
    if not is_small:
        check_prompts(fields, len(body))
    fields = _public(fields, inside="")
    # vLLM merges vllm_xargs into extra_args, where it reads the KV parameters.
    if (extra := fields.get("vllm_xargs")) is not None:
        fields["vllm_xargs"] = _public_extra(extra, inside="vllm_xargs")
    if (sampling := fields.get(SAMPLING)) is not None:
        fields[SAMPLING] = _public_sampling(sampling)
    return fields


def _otherwise_encoded(body: bytes, error: NotJson | UnicodeDecodeError) -> Fields:
    """Parse a body that is not an object in UTF-8; raises BadRequest: it is none in another
    encoding, either.
    """
    text = _in_utf8(body)
    if text is None:
        raise _not_an_object(error) from error
    check_names(text)
    try:
        return decode(text, Fields)
    except NotJson as exc:
        raise _not_an_object(exc) from exc


def _not_an_object(error: NotJson | UnicodeDecodeError) -> BadRequest:
    if isinstance(error, OtherJson):
        return BadRequest("the body is JSON, but not an object")
    return BadRequest(f"the body is not JSON: {error}")


def _in_utf8(body: bytes) -> bytes | None:
    """Return a body in UTF-8, if it is in another encoding that vLLM reads, or has a byte order
    mark; None: it is not.

    vLLM reads it with Python's json.loads, which detects the encoding by the mark, or by the zeros
    of the first characters.
    """
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return None
    try:
        return body.decode(encoding).encode()
    except UnicodeError:
        return None


def check_wanted_now(api: Api, fields: Fields) -> None:
    """Accept a request whose answer comes on this connection.

    Raises:
        BadRequest: it is to be fetched later from the engine that has it: clients cannot reach a
            certain engine.
    """
    if api is _RESPONSES and fields.get("background", NULL) not in (NULL, FALSE):
        raise BadRequest(
            "background answers cannot be fetched through this router: leave it out",
            param="background",
        )


def check_chat_template(fields: Fields) -> None:
    """Accept a request that uses the engine's own chat template.

    Rendering a template takes as long as its loops run, and meanwhile the engine renders no other
    chat. vLLM refuses both fields without --trust-request-chat-template; 0.30 and 0.31 do not check
    the second one in /v1/responses.

    Raises:
        BadRequest: it has a template.
    """
    is_named = fields.get(_TEMPLATE, NULL) != NULL
    if (
        is_named
        or (maybe(fields.get(_TEMPLATE_KWARGS, NULL), Fields) or {}).get(_TEMPLATE, NULL) != NULL
    ):
        param = _TEMPLATE if is_named else f"{_TEMPLATE_KWARGS}.{_TEMPLATE}"
        raise BadRequest(
            f"{param} must not be part of a request: engines use their own template, unless the "
            f"operator of this "
            "router allows others (trust_request_chat_template)",
            param=param,
        )


def named(api: Api, fields: Fields, request: RequestId) -> Fields:
    """Give both legs the router's id of the request, in APIs where engines do not take it from
    X-Request-Id.
    """
    return fields | {"request_id": text(f"resp_{request}")} if api is _RESPONSES else fields


def names_no_model(fields: Fields) -> bool:
    """Tell whether a request leaves its model to the engine: for vLLM an empty name is none."""
    return bytes(fields.get("model", NULL)) in _NO_NAME


def prefill_fields(
    api: Api, fields: Fields, transfer: TransferId, *, pushes: bool = False
) -> Fields:
    """Return the prefill leg's fields: everything that shapes the prompt, and a limit of one token.

    They always have the transfer's id: whether the engine pushes is known from its answer.
    ``pushes``: an engine that can do either shall push.
    """
    kept = fields.copy()
    for name in _ONLY_FOR_DECODE[api].intersection(fields):
        del kept[name]
    if kept.get("n", NULL) != NULL:
        kept["n"] = _ONE
    kept.update(_ONE_TOKEN[api])
    if api is _GENERATE:
        sampling = (maybe(kept.get(SAMPLING, NULL), Fields) or {}) | _SAMPLED_ONCE
        if sampling.get("n", NULL) != NULL:
            sampling["n"] = _ONE
        kept[SAMPLING] = msgspec.Raw(encode(sampling))
    kept["stream"] = FALSE  # a streamed answer carries no kv_transfer_params
    kept["kv_transfer_params"] = msgspec.Raw(
        (_ASKING_PUSH if pushes else _ASKING) % transfer.encode()
    )
    return kept


def decode_body(fields: Fields, kv_params: msgspec.Raw) -> bytes:
    """Return the encoded ``decode_fields``."""
    return encode(decode_fields(fields, kv_params))


def decode_fields(fields: Fields, kv_params: msgspec.Raw) -> Fields:
    """Return the decode leg's fields: the client's request, and the location of its prompt's KV
    cache.
    """
    return fields | {"kv_transfer_params": kv_params}


def decode_pieces_with_ids(
    api: Api, fields: Fields, kv_params: msgspec.Raw, ids: msgspec.Raw, shared: Sequence[str] = ()
) -> Pieces:
    """Return the decode leg's body with the ids of the prompt, so the decode engine does not render
    and tokenize it again.

    Many ids are not copied.
    """
    if api is _COMPLETIONS:
        return encode_in_pieces(
            fields | {"prompt": ids, "kv_transfer_params": kv_params}, "prompt", shared
        )
    pieces = encode_in_pieces(fields, "messages", shared)
    view = memoryview(ids)
    pieces[-1:] = [
        pieces[-1][:-1],
        b',"kv_transfer_params":',
        bytes(kv_params).rstrip()[:-1],
        _IDS,
        view,
        b"}}",
    ]
    return pieces if len(view) > LONG else [b"".join(pieces)]


def with_ids(kv_params: msgspec.Raw, ids: msgspec.Raw) -> msgspec.Raw:
    """Add token ids to parameters, an object with members: they are a chat's prompt, in place of
    its messages.

    vLLM removes the key before anything else reads the parameters
    (vllm/renderers/online_renderer.py).
    """
    return msgspec.Raw(b"%b%b%b}" % (bytes(kv_params).rstrip()[:-1], _IDS, bytes(ids)))


_IDS: Final = b',"prompt_token_ids":'
RELEASE_PATH: Final = Api.COMPLETIONS.value


def release_body(fields: Fields, kv_params: msgspec.Raw) -> bytes:
    """Return a request for more tokens than any decode engine has room for: it refuses, and tells
    the prefill engine to free.

    A prefill engine keeps blocks that no engine reads for a whole lease, and listens to other
    engines only.
    """
    return _about_blocks(fields, _TOO_MANY, kv_params)


def abandon_body(fields: Fields, transfer: TransferId) -> bytes:
    """Return a request that tells a prefill engine to free the blocks of a transfer whose answer
    was not waited for.

    It may have finished at that moment, and vLLM does not tell a connector of the abort of a
    finished request. The request is for one token, which any engine can compute; a connector that
    does not know the parameter ignores it.
    """
    return _about_blocks(fields, _ONE, msgspec.Raw(_ABANDONING % text(transfer)))


def _about_blocks(fields: Fields, tokens: msgspec.Raw, kv_params: msgspec.Raw) -> bytes:
    own_fields: Fields = {
        "prompt": _ANY_PROMPT,
        "max_tokens": tokens,
        "stream": FALSE,
        "kv_transfer_params": kv_params,
    }
    return encode({name: fields[name] for name in ("model",) if name in fields} | own_fields)


def kv_params(
    prefill: InstanceId, answer: bytes, parsed: TokensAnswer | PromptIdsAnswer | None = None
) -> tuple[msgspec.Raw, TransferNaming | None, int | None]:
    """Return the KV parameters of a prefill engine's answer, checked and undecoded; their typed
    form, if they are as usual; and the prompt's tokens, if known.

    ``parsed``: the answer, if it was parsed before.

    Raises:
        EngineError: they are missing, or a decode engine would crash on them.
    """
    try:
        plain_answer = maybe(answer, PlainPrefillAnswer) if parsed is None else None
        if isinstance(parsed, TokensAnswer):
            raw_params = parsed.kv_transfer_params
            count = (
                None
                if parsed.usage is None
                else maybe(parsed.usage.get("prompt_tokens", NULL), int)
            )
        elif (typed_answer := parsed or plain_answer) is not None:
            raw_params = typed_answer.kv_transfer_params
            count = None if typed_answer.usage is None else prompt_of(typed_answer.usage)
        else:
            other_answer = decode(answer, PrefillAnswer)
            raw_params = other_answer.kv_transfer_params
            count = counted(other_answer.usage)
        if (known_params := _as_usual(raw_params)) is not None:
            return raw_params, known_params, count
        if raw_params == NULL:
            raise NoKvParams(
                f"{prefill} answered without kv_transfer_params: it keeps no KV cache for this "
                f"request"
            )
        params = decode(raw_params, Fields)
        missing = _missing(params)
    except NotJson as exc:
        raise EngineError(f"{prefill} answered without usable kv_transfer_params") from exc
    if params.get("do_remote_prefill") != TRUE:
        raise NoKvParams(
            f"{prefill} kept no KV cache for this request: do_remote_prefill is not true"
        )
    if missing:
        raise EngineError(f"{prefill} left out of its kv_transfer_params: {', '.join(missing)}")
    return raw_params, None, count


def _missing(params: Fields) -> Sequence[str]:
    return [name for name in _NEEDED if _is_empty(params.get(name, NULL))]


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


def _public(fields: Fields, *, inside: str) -> Fields:
    """Drop private parameters that are null; raises BadRequest: one has a value."""
    for name in _PRIVATE:
        if name in fields and fields.pop(name) != NULL:
            message = f"{inside}{name} is set by the router and must not be part of a request"
            raise BadRequest(message, param=f"{inside}{name}")
    return fields


def _public_sampling(raw: msgspec.Raw) -> msgspec.Raw:
    """Clean ``extra_args`` of vLLM's sampling parameters (vllm/sampling_params.py), which has the
    KV parameters, too.
    """
    sampling = maybe(raw, Fields)
    if sampling is None or (extra := sampling.get(_EXTRA)) is None:
        return raw
    public = _public_extra(extra, inside=f"{SAMPLING}.{_EXTRA}")
    return msgspec.Raw(encode(sampling | {_EXTRA: public}))


def _public_extra(extra: msgspec.Raw, *, inside: str) -> msgspec.Raw:
    try:
        fields = decode(extra, Fields)
    except OtherJson:
        return extra  # not an object: null, or something the engine refuses
    except NotJson as exc:
        raise BadRequest(f"{inside} is not JSON: {exc}", param=inside) from exc
    if fields.keys().isdisjoint(_NOT_IN_EXTRA):
        return extra
    fields.pop(_REPORT_MODE, None)
    return msgspec.Raw(encode(_public(fields, inside=f"{inside}.")))
