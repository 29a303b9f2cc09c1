"""Decides which requests must not be split between two engines.

A split is right only while both engines make the same prompt of the request, the prefill engine
generates only its one token, and one sequence on the decode engine reads the blocks. Any other
request is served by one decode engine from start to end: slower, never wrong. Fields that the
prefill leg drops or replaces need a check here: the prefill engine cannot refuse them any more, and
a decode engine that does (before it has parsed the body) leaves the prefill engine's blocks pinned
for a whole lease. So each such field has its plain values here; a request with any other value goes
to one engine, which reports the error.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, cast

import msgspec

from pdrelay_proxy.core.http.json_bounds import count_items
from pdrelay_proxy.core.model import Api, SingleEngineReason
from pdrelay_proxy.core.protocol.client_body import SAMPLING
from pdrelay_proxy.core.raw_json import Fields, NotJson, decode, encode

_Json = object
_Values: TypeAlias = Mapping[str, _Json]
# The field that holds the prompt.
PROMPTS: Final[Mapping[Api, str]] = {
    Api.COMPLETIONS: "prompt",
    Api.CHAT: "messages",
    Api.RESPONSES: "input",
    Api.MESSAGES: "messages",
    Api.GENERATE: "token_ids",
}
# The relevant fields of requests that may be split, as they came: clients send few combinations,
# and checking one costs more than all other decisions.
_SPLIT: Final[Mapping[Api, set[bytes]]] = {api: set() for api in Api}
_SPLIT_MOST: Final = 256
_SPLIT_BYTES: Final = 512
_WORDS: Final[Mapping[bytes, bool | None]] = {b"true": True, b"false": False, b"null": None}
_LONG: Final = 10  # digits; a shorter number is small
_VALUE_MOST: Final = 256 * 1024  # bytes of a value that is decoded; tools have thousands
_BRACKET: Final = 91  # begins a list
_WHITESPACE: Final = b" \t\n\r"
_COMPLETIONS: Final = Api.COMPLETIONS


def solo_reason(api: Api, fields: Fields) -> SingleEngineReason | None:
    """Return why one engine must serve the request alone; None: it can be split."""
    if api is _COMPLETIONS and not _is_one_prompt(fields.get("prompt")):
        return SingleEngineReason.PROMPTS
    relevant_names = _RELEVANT[api]
    split = _SPLIT[api]
    relevant = {name: raw for name, raw in fields.items() if name in relevant_names}
    key = encode(relevant)
    if key not in split:
        reason = _odd_reason(api, relevant)
        if reason is not None:
            return reason
        if len(key) <= _SPLIT_BYTES:
            if len(split) >= _SPLIT_MOST:
                split.clear()
            split.add(key)
    return None


def may_share(api: Api, fields: Fields) -> bool:
    """Return whether a request for n answers can be split where engines share a load."""
    relevant = {name: raw for name, raw in fields.items() if name in _RELEVANT[api]}
    return _odd_reason(api, relevant, shares=True) is None


def _odd_reason(api: Api, relevant: Fields, *, shares: bool = False) -> SingleEngineReason | None:
    plain = _PLAIN[api]
    values: _Values = {name: _value(bytes(raw)) for name, raw in relevant.items()}
    if api is Api.GENERATE:
        values = _with_sampling(values)
    odd = [
        plain[name][1]
        for name, value in values.items()
        if name in plain and not plain[name][0](value)
    ]
    if shares and odd.count(SingleEngineReason.N) == 1 and _is_int(values.get(_N[api]), least=2):
        odd.remove(SingleEngineReason.N)
    if odd:
        # of several reasons the first in the table
        return next(reason for _, reason in plain.values() if reason in odd)
    return None if _FIT[api](values) else SingleEngineReason.UNUSUAL


def _with_sampling(values: _Values) -> _Values:
    """Add the sampling parameters to the other values, by names with a dot."""
    sampling = values.get(SAMPLING)
    if not isinstance(sampling, dict):
        return values
    inner = cast("dict[str, _Json]", sampling)
    return {**values, **{f"{SAMPLING}.{name}": value for name, value in inner.items()}}


def _value(text: bytes) -> _Json:
    """Decode a value; "?", which is plain for no field: it cannot be decoded, or is long."""
    if len(text) > _VALUE_MOST:
        return "?"
    if text.isdigit() and len(text) < _LONG:
        return int(text)
    try:
        return _WORDS[text] if text in _WORDS else decode(text, object)
    except NotJson:
        return "?"


def _is_one_prompt(raw: msgspec.Raw | None) -> bool:
    """Return whether this is one prompt: text, or token ids, which are not decoded."""
    if raw is None:
        return True  # the engine refuses it, or finds the prompt elsewhere (see prompt_embeds)
    view = memoryview(raw)
    if not len(view) or view[0] != _BRACKET:
        return True
    text = bytes(raw)
    first = text[1:].lstrip(_WHITESPACE)[:1]
    if first.isdigit():
        return True
    return count_items(text, 1) == 1


def _is_int(value: _Json, *, least: int) -> bool:
    return type(value) is int and value >= least


def _is_none(value: _Json) -> bool:
    return value is None


def _is_none_or_one(value: _Json) -> bool:
    return value is None or (type(value) is int and value == 1)


def _is_false(value: _Json) -> bool:
    return value is False


def _is_none_or_false(value: _Json) -> bool:
    return value is None or value is False


def _two_or_more(value: _Json) -> bool:
    return value is None or _is_int(value, least=2)


def _switch(value: _Json) -> bool:
    return value is None or type(value) is bool


def _natural(value: _Json) -> bool:
    return _is_int(value, least=0)


def _count(value: _Json) -> bool:
    return value is None or _is_int(value, least=0)


def _ids(value: _Json) -> bool:
    return value is None or (
        isinstance(value, list)
        and all(_is_int(item, least=0) for item in cast("list[_Json]", value))
    )


def _switches(value: _Json) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(_switch(item) for item in cast("dict[str, _Json]", value).values())
    )


def _limit(value: _Json) -> bool:
    return _is_int(value, least=2)


def _untruncated(value: _Json) -> bool:
    return value == "disabled"


def _functions(value: _Json) -> bool:
    """Return whether all tools are functions, which the client runs; the engine runs others itself,
    between two generations.
    """
    return isinstance(value, list) and all(
        isinstance(tool, dict) and cast("dict[str, _Json]", tool).get("type") == "function"
        for tool in cast("list[_Json]", value)
    )


def _completions_fit(values: _Values) -> bool:
    return (
        _count(values.get("logprobs")) and _is_refined_well(values) and _stream_options_fit(values)
    )


def _chat_fits(values: _Values) -> bool:
    return (
        _switch(values.get("logprobs")) and _is_refined_well(values) and _stream_options_fit(values)
    )


def _is_refined_well(values: _Values) -> bool:
    """Return whether logprobs is set if its refinements are: vLLM refuses them without."""
    has_refinements = values.get("top_logprobs") or values.get("logprob_token_ids")
    return not has_refinements or values.get("logprobs") not in (None, False)


def _stream_options_fit(values: _Values) -> bool:
    return not values.get("stream_options") or values.get("stream") is True


def _sampling_fits(values: _Values) -> bool:
    """Return whether there are sampling parameters, whose limits do not cross."""
    minimum = values.get(f"{SAMPLING}.min_tokens", 0)
    maximum = values.get(f"{SAMPLING}.max_tokens")
    if not isinstance(values.get(SAMPLING), dict) or not _stream_options_fit(values):
        return False
    return maximum is None or (type(minimum) is int and type(maximum) is int and minimum <= maximum)


def _responses_fit(_: _Values) -> bool:
    return True


def _messages_fit(values: _Values) -> bool:
    """Return whether the required limit is there, and that of thinking is below it
    (vllm/entrypoints/anthropic/protocol.py): the decode engine checks both, prefill neither.
    """
    limit = values.get("max_tokens")
    thinking = values.get("thinking")
    if not _limit(limit):
        return False
    if thinking is None:
        return True
    budget = (
        cast("dict[str, _Json]", thinking).get("budget_tokens")
        if isinstance(thinking, dict)
        else False
    )
    return budget is None or (type(budget) is int and type(limit) is int and budget < limit)


_Plain: TypeAlias = Mapping[str, tuple[Callable[[_Json], bool], SingleEngineReason]]
_OPENAI: Final[_Plain] = {
    # a split would give a wrong answer
    "prompt_embeds": (_is_none, SingleEngineReason.EMBEDS),
    "n": (_is_none_or_one, SingleEngineReason.N),
    "best_of": (_is_none_or_one, SingleEngineReason.BEST_OF),
    "use_beam_search": (_is_false, SingleEngineReason.BEAM),
    "echo": (_is_none_or_false, SingleEngineReason.ECHO),
    "prompt_logprobs": (_is_none, SingleEngineReason.PROMPT_LOGPROBS),
    "max_tokens": (_two_or_more, SingleEngineReason.FEW_TOKENS),
    "max_completion_tokens": (_two_or_more, SingleEngineReason.FEW_TOKENS),
    "truncate_prompt_tokens": (_is_none, SingleEngineReason.TRUNCATED),
    # the prefill engine cannot check these
    "stream": (_switch, SingleEngineReason.UNUSUAL),
    "stream_options": (_switches, SingleEngineReason.UNUSUAL),
    "min_tokens": (_natural, SingleEngineReason.UNUSUAL),
    "top_logprobs": (_count, SingleEngineReason.UNUSUAL),
    "logprob_token_ids": (_ids, SingleEngineReason.UNUSUAL),
}
_PLAIN: Final[Mapping[Api, _Plain]] = {
    Api.COMPLETIONS: _OPENAI,
    Api.CHAT: _OPENAI,
    Api.RESPONSES: {
        "previous_response_id": (_is_none, SingleEngineReason.STORED),
        "tools": (_functions, SingleEngineReason.TOOLS),
        "max_output_tokens": (_two_or_more, SingleEngineReason.FEW_TOKENS),
        "truncation": (_untruncated, SingleEngineReason.TRUNCATED),
        "stream": (_switch, SingleEngineReason.UNUSUAL),
        "store": (_switch, SingleEngineReason.UNUSUAL),
        "background": (_switch, SingleEngineReason.UNUSUAL),
    },
    Api.MESSAGES: {
        "max_tokens": (_limit, SingleEngineReason.FEW_TOKENS),
        "stream": (_switch, SingleEngineReason.UNUSUAL),
    },
    Api.GENERATE: {
        f"{SAMPLING}.n": (_is_none_or_one, SingleEngineReason.N),
        f"{SAMPLING}.prompt_logprobs": (_is_none, SingleEngineReason.PROMPT_LOGPROBS),
        f"{SAMPLING}.prompt_logprob_token_ids": (_is_none, SingleEngineReason.PROMPT_LOGPROBS),
        f"{SAMPLING}.max_tokens": (_two_or_more, SingleEngineReason.FEW_TOKENS),
        f"{SAMPLING}.min_tokens": (_natural, SingleEngineReason.UNUSUAL),
        "stream": (_switch, SingleEngineReason.UNUSUAL),
        "stream_options": (_switches, SingleEngineReason.UNUSUAL),
    },
}
_N: Final = dict.fromkeys(Api, "n") | {Api.GENERATE: f"{SAMPLING}.n"}
# Other relevant fields, and the conditions on several values together.
_BESIDE: Final[Mapping[Api, tuple[str, ...]]] = {
    Api.COMPLETIONS: ("logprobs",),
    Api.CHAT: ("logprobs",),
    Api.RESPONSES: (),
    Api.MESSAGES: ("thinking",),
    Api.GENERATE: (),
}
_RELEVANT: Final[Mapping[Api, frozenset[str]]] = {
    api: frozenset(name.partition(".")[0] for name in (*_PLAIN[api], *_BESIDE[api])) for api in Api
}
_FIT: Final[Mapping[Api, Callable[[_Values], bool]]] = {
    Api.COMPLETIONS: _completions_fit,
    Api.CHAT: _chat_fits,
    Api.RESPONSES: _responses_fit,
    Api.MESSAGES: _messages_fit,
    Api.GENERATE: _sampling_fits,
}
