"""Makes the two engine requests of a client's request.

The prefill engine computes the prompt and stops after one token; its answer has
``kv_transfer_params`` (core/protocol/prefill_answer.py), which go to the decode engine unchanged.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pdrelay_proxy.core.model import Api, RequestId, TransferId
from pdrelay_proxy.core.protocol.client_body import SAMPLING
from pdrelay_proxy.core.raw_json import (
    FALSE,
    LONG,
    NULL,
    TRUE,
    Fields,
    Pieces,
    encode,
    encode_in_pieces,
    maybe,
    to_raw,
)

_RESPONSES: Final = Api.RESPONSES
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
_IDS: Final = b',"prompt_token_ids":'
RELEASE_PATH: Final = Api.COMPLETIONS.value
_ABANDONING: Final = (
    b'{"do_remote_decode":false,"do_remote_prefill":false,"abandoned_transfer_id":%b}'
)
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
_SAMPLED_ONCE: Final[Fields] = dict.fromkeys(("max_tokens", "min_tokens"), _ONE)


def named(api: Api, fields: Fields, request: RequestId) -> Fields:
    """Name a request by the router's id where engines do not take it from X-Request-Id."""
    return fields | {"request_id": to_raw(f"resp_{request}")} if api is _RESPONSES else fields


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
        kept[SAMPLING] = to_raw(sampling)
    kept["stream"] = FALSE  # a streamed answer carries no kv_transfer_params
    kept["kv_transfer_params"] = msgspec.Raw(
        (_ASKING_PUSH if pushes else _ASKING) % transfer.encode()
    )
    return kept


def decode_body(fields: Fields, kv_params: msgspec.Raw) -> bytes:
    """Return the encoded ``decode_fields``."""
    return encode(decode_fields(fields, kv_params))


def decode_fields(fields: Fields, kv_params: msgspec.Raw) -> Fields:
    """Return the decode leg's fields: the client's, and where its prompt's KV cache is."""
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
    return _about_blocks(fields, _ONE, msgspec.Raw(_ABANDONING % to_raw(transfer)))


def _about_blocks(fields: Fields, tokens: msgspec.Raw, kv_params: msgspec.Raw) -> bytes:
    own_fields: Fields = {
        "prompt": _ANY_PROMPT,
        "max_tokens": tokens,
        "stream": FALSE,
        "kv_transfer_params": kv_params,
    }
    return encode(({"model": fields["model"]} if "model" in fields else {}) | own_fields)
