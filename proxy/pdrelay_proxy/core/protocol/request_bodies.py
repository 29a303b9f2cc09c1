"""How one client request becomes two engine requests.

The prefill engine computes the prompt and stops after one token; its answer carries
``kv_transfer_params``, which go to the decode engine as they are. Only the names of a body's fields
are decoded. The values stay the client's own bytes, so that floats, big integers, escapes and
fields of tomorrow arrive as they were sent. When a name occurs twice the last value counts, as it
does in vLLM, and only that one is sent on: both engines see the same request.
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

_RESPONSES: Final = Api.RESPONSES  # looking a member up takes as long as a call
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
_SPACE: Final = 32  # white space is no more than it

# of GENERATE: an object with what other calls have beside the prompt
SAMPLING: Final = "sampling_params"
_EXTRA: Final = "extra_args"

# Only the router may set these: from a client they name memory that is not the client's, or kill
# the engine.
_PRIVATE: Final = ("kv_transfer_params", "ec_transfer_params")
# "full" has vLLM 0.32 tell again of every cached block that a request uses
# (vllm/v1/core/kv_cache_manager.py): events for all routers that follow the engine, as many as a
# client likes. The answer is the same without it.
_REPORT_MODE: Final = "kv_cache_report_mode"
_NOT_IN_EXTRA: Final = frozenset({*_PRIVATE, _REPORT_MODE})
_TEMPLATE: Final = "chat_template"
_TEMPLATE_KWARGS: Final = "chat_template_kwargs"
TEMPLATES: Final = frozenset({_TEMPLATE, _TEMPLATE_KWARGS})
# They shape the tokens that decode makes, or the way it shows them; prefill shows its one token to
# nobody.
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
# An end-of-sequence as first token would end a request another way than by length; not every API
# can rule it out.
_ONE_TOKEN: Final[Mapping[Api, Fields]] = {
    Api.COMPLETIONS: dict.fromkeys(("max_tokens", "min_tokens"), _ONE),
    Api.CHAT: dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), _ONE),
    # nobody will ask the prefill engine for its answer
    Api.RESPONSES: {"max_output_tokens": _ONE, "store": FALSE},
    Api.MESSAGES: {"max_tokens": _ONE},
    Api.GENERATE: {},  # its limits are among the sampling parameters
}
_SAMPLED_ONCE: Final[Fields] = dict.fromkeys(("max_tokens", "min_tokens"), _ONE)
# Without one of these vLLM 0.32 dies on an assertion or a KeyError, and with it every request it
# serves.
_NEEDED: Final = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
)


def parse(body: bytes) -> Fields:
    """Read a client's body, and refuse the parameters only the router may set.

    ``kv_cache_report_mode`` is left out of vLLM's extra arguments.

    Raises:
        BadRequest: the body is not a JSON object, carries such parameters, or has too many names or
            prompts.
    """
    is_small = len(body) <= SMALL
    if not is_small:
        check_names(body)
    try:
        if not body.isascii():
            body.decode()  # values are not decoded here, and vLLM would answer in FastAPI's words
        fields = decode(body, Fields)
    except (NotJson, UnicodeDecodeError) as exc:
        fields = _otherwise_encoded(body, exc)
    if not is_small:
        check_prompts(fields, len(body))
    fields = _public(fields, inside="")
    # vLLM merges vllm_xargs into the place where it looks for the KV parameters.
    if (extra := fields.get("vllm_xargs")) is not None:
        fields["vllm_xargs"] = _public_extra(extra, inside="vllm_xargs")
    if (sampling := fields.get(SAMPLING)) is not None:
        fields[SAMPLING] = _public_sampling(sampling)
    return fields


def _otherwise_encoded(body: bytes, why: NotJson | UnicodeDecodeError) -> Fields:
    """Read a body that is no object in UTF-8; raises BadRequest: it is none in another encoding,
    either.
    """
    text = _in_utf8(body)
    if text is None:
        raise _not_an_object(why) from why
    check_names(text)
    try:
        return decode(text, Fields)
    except NotJson as exc:
        raise _not_an_object(exc) from exc


def _not_an_object(why: NotJson | UnicodeDecodeError) -> BadRequest:
    if isinstance(why, OtherJson):
        return BadRequest("the body is JSON, but not an object")
    return BadRequest(f"the body is not JSON: {why}")


def _in_utf8(body: bytes) -> bytes | None:
    """Return a body in UTF-8, if it is in another encoding that vLLM reads, or begins with a mark;
    None: it is not.

    vLLM reads it with Python's json.loads, which goes by the mark, or by the zeros of the first
    characters.
    """
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return None
    try:
        return body.decode(encoding).encode()
    except UnicodeError:
        return None


def check_wanted_now(api: Api, fields: Fields) -> None:
    """Accept a request whose answer is wanted on this connection.

    Raises:
        BadRequest: it is to be fetched later, from the engine that has it: clients cannot reach a
            certain engine.
    """
    if api is _RESPONSES and fields.get("background", NULL) not in (NULL, FALSE):
        raise BadRequest(
            "background answers cannot be fetched through this router: leave it out",
            param="background",
        )


def check_chat_template(fields: Fields) -> None:
    """Accept a request whose chat template is the engine's own.

    Rendering one takes as long as its loops want, and meanwhile the engine renders no other chat.
    vLLM refuses both fields without --trust-request-chat-template; 0.30 and 0.31 forget the second
    one in /v1/responses.

    Raises:
        BadRequest: it brings a template.
    """
    named = fields.get(_TEMPLATE, NULL) != NULL
    if (
        named
        or (maybe(fields.get(_TEMPLATE_KWARGS, NULL), Fields) or {}).get(_TEMPLATE, NULL) != NULL
    ):
        param = _TEMPLATE if named else f"{_TEMPLATE_KWARGS}.{_TEMPLATE}"
        raise BadRequest(
            f"{param} must not be part of a request: engines use their own template, unless the "
            f"operator of this "
            "router allows others (trust_request_chat_template)",
            param=param,
        )


def named(api: Api, fields: Fields, request: RequestId) -> Fields:
    """Give both legs our name of the request, where the engines do not take it from
    X-Request-Id.
    """
    return fields | {"request_id": text(f"resp_{request}")} if api is _RESPONSES else fields


def prefill_body(api: Api, fields: Fields, transfer: TransferId) -> bytes:
    """Write what ``prefill_fields`` makes of a request."""
    return encode(prefill_fields(api, fields, transfer))


def prefill_fields(
    api: Api, fields: Fields, transfer: TransferId, *, pushes: bool = False
) -> Fields:
    """Ask for the KV cache of the prompt: everything that shapes the prompt, and one token.

    The name of the transfer goes along in any case: whether the engine pushes is known from its
    answer. ``pushes``: it can do either, and shall push.
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
    """Write what ``decode_fields`` makes of a request."""
    return encode(decode_fields(fields, kv_params))


def decode_fields(fields: Fields, kv_params: msgspec.Raw) -> Fields:
    """Ask for the tokens: the client's request, and where the KV cache of its prompt is."""
    return fields | {"kv_transfer_params": kv_params}


def decode_pieces_with_ids(
    api: Api, fields: Fields, kv_params: msgspec.Raw, ids: msgspec.Raw, shared: Sequence[str] = ()
) -> Pieces:
    """Ask for the same, of the ids of the prompt: the decode engine does not render and tokenize it
    again.

    Many ids are not copied.
    """
    if api is _COMPLETIONS:
        return encode_in_pieces(
            fields | {"prompt": ids, "kv_transfer_params": kv_params}, "prompt", shared
        )
    pieces = encode_in_pieces(fields, "messages", shared)
    written = memoryview(ids)
    pieces[-1:] = [
        pieces[-1][:-1],
        b',"kv_transfer_params":',
        bytes(kv_params).rstrip()[:-1],
        _IDS,
        written,
        b"}}",
    ]
    return pieces if len(written) > LONG else [b"".join(pieces)]


def with_ids(kv_params: msgspec.Raw, ids: msgspec.Raw) -> msgspec.Raw:
    """Add token ids to parameters, an object with members: a chat's prompt is these, whatever its
    messages say.

    vLLM takes the key out before anything else reads the parameters, which stay as they came.
    """
    return msgspec.Raw(b"%b%b%b}" % (bytes(kv_params).rstrip()[:-1], _IDS, bytes(ids)))


_IDS: Final = b',"prompt_token_ids":'
RELEASE_PATH: Final = Api.COMPLETIONS.value


def release_body(fields: Fields, kv_params: msgspec.Raw) -> bytes:
    """Ask a decode engine for more tokens than any has room for: it refuses, and tells the prefill
    engine to free.

    A prefill engine keeps its blocks for a whole lease when nobody comes for them, and listens to
    other engines only.
    """
    return _about_blocks(fields, _TOO_MANY, kv_params)


def abandon_body(fields: Fields, transfer: TransferId) -> bytes:
    """Tell a prefill engine that nobody will come for the blocks of a transfer whose answer was not
    waited for.

    It may have finished at that moment, and vLLM does not tell a connector of the abort of a
    finished request. The request is one token that any engine can compute; a connector that does
    not know the parameter ignores it.
    """
    return _about_blocks(fields, _ONE, msgspec.Raw(_ABANDONING % text(transfer)))


def _about_blocks(fields: Fields, tokens: msgspec.Raw, kv_params: msgspec.Raw) -> bytes:
    asked: Fields = {
        "prompt": _ANY_PROMPT,
        "max_tokens": tokens,
        "stream": FALSE,
        "kv_transfer_params": kv_params,
    }
    return encode({name: fields[name] for name in ("model",) if name in fields} | asked)


def kv_params(
    prefill: InstanceId, answer: bytes, read: TokensAnswer | PromptIdsAnswer | None = None
) -> tuple[msgspec.Raw, TransferNaming | None, int | None]:
    """Take the KV parameters out of a prefill engine's answer; ``read``: the same, if it was read.

    Return them, unread but checked; what they name, if that was read; and the tokens of the prompt,
    if it says them.

    Raises:
        EngineError: they are missing, or such that a decode engine would not survive them.
    """
    try:
        plain = maybe(answer, PlainPrefillAnswer) if read is None else None
        if isinstance(read, TokensAnswer):
            found = read.kv_transfer_params
            count = (
                None if read.usage is None else maybe(read.usage.get("prompt_tokens", NULL), int)
            )
        elif (said := read or plain) is not None:
            found = said.kv_transfer_params
            count = None if said.usage is None else prompt_of(said.usage)
        else:
            odd = decode(answer, PrefillAnswer)
            found = odd.kv_transfer_params
            count = counted(odd.usage)
        if (good := _good(found)) is not None:
            return found, good, count
        if found == NULL:
            raise NoKvParams(
                f"{prefill} answered without kv_transfer_params: it keeps no KV cache for this "
                f"request"
            )
        params = decode(found, Fields)
        missing = _missing(params)
    except NotJson as exc:
        raise EngineError(f"{prefill} answered without usable kv_transfer_params") from exc
    if params.get("do_remote_prefill") != TRUE:
        raise NoKvParams(
            f"{prefill} kept no KV cache for this request: do_remote_prefill is not true"
        )
    if missing:
        raise EngineError(f"{prefill} left out of its kv_transfer_params: {', '.join(missing)}")
    return found, None, count


def _missing(params: Fields) -> Sequence[str]:
    return [name for name in _NEEDED if _is_empty(params.get(name, NULL))]


def _good(params: msgspec.Raw) -> KvParams | None:
    """Recognise parameters as all engines send them; others may be good as well, and need a closer
    look.
    """
    found = maybe(params, KvParams)
    return (
        None
        if found is None or not found.do_remote_prefill or _is_empty(found.remote_block_ids)
        else found
    )


def _is_empty(value: msgspec.Raw) -> bool:
    """Tell null and the like: an empty list of blocks kills an engine as none does.

    A port may be 0.
    """
    text = bytes(value)
    if len(text) > 1 and text[0] == _BRACKET and text[1] > _SPACE and text[1] != _CLOSING:
        return False
    if text.startswith(b"[") and text.isascii():
        return text[1:].lstrip(b" \t\n\r").startswith(b"]")  # a long list need not be read
    return decode(text, object) in (None, "", [])


def _public(fields: Fields, *, inside: str) -> Fields:
    """Drop the private parameters that say nothing; raises BadRequest: one says something."""
    for name in _PRIVATE:
        if name in fields and fields.pop(name) != NULL:
            message = f"{inside}{name} is set by the router and must not be part of a request"
            raise BadRequest(message, param=f"{inside}{name}")
    return fields


def _public_sampling(raw: msgspec.Raw) -> msgspec.Raw:
    """Sampling parameters of vLLM's own have such a place, too: ``extra_args`` in
    vllm/sampling_params.py.
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
