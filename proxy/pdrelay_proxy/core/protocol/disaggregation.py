"""Which requests must not be split between two engines.

A split is right only while both engines make the same prompt out of the request, the prefill
engine's one token is all it makes, and one sequence on the decode engine reads the blocks. What
does not fit is served by one decode engine from start to end: slower, never wrong. The fields that
the prefill leg drops or replaces need one more look, for the prefill engine cannot refuse them any
more and a decode engine that does (before it has parsed the body) leaves the prefill engine's
blocks pinned for a whole lease. So each has its plain values here; what is not plain goes to one
engine, which says what is wrong with it.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, cast

import msgspec

from pdrelay_proxy.core.http.json_bounds import count_items
from pdrelay_proxy.core.model import Api, SingleEngineReason
from pdrelay_proxy.core.protocol.request_bodies import SAMPLING
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
# The fields that are looked at, as they came, where they were found to be plain: clients ask for
# few combinations, and looking costs more than all other choices.
_SPLIT: Final[Mapping[Api, set[bytes]]] = {api: set() for api in Api}
_SPLIT_MOST: Final = 256
_SPLIT_BYTES: Final = 512
_WORDS: Final[Mapping[bytes, bool | None]] = {b"true": True, b"false": False, b"null": None}
_LONG: Final = 10  # digits; all shorter numbers are small
_VALUE_MOST: Final = 256 * 1024  # bytes of a value that is decoded; tools have some thousands
_BRACKET: Final = 91  # begins a list
_WHITESPACE: Final = b" \t\n\r"
_COMPLETIONS: Final = Api.COMPLETIONS  # looking a member up takes as long as a call


def solo_reason(api: Api, fields: Fields) -> SingleEngineReason | None:
    """Return why one engine must serve the request alone, or None when it can be split."""
    if api is _COMPLETIONS and not _is_one_prompt(fields.get("prompt")):
        return SingleEngineReason.PROMPTS
    looked_at = _LOOKED_AT[api]
    split = _SPLIT[api]
    asked = {name: raw for name, raw in fields.items() if name in looked_at}
    written = encode(asked)
    if written not in split:
        reason = _odd_reason(api, asked)
        if reason is not None:
            return reason
        if len(written) <= _SPLIT_BYTES:
            if len(split) >= _SPLIT_MOST:
                split.clear()
            split.add(written)
    return None


def may_share(api: Api, fields: Fields) -> bool:
    """Tell whether a request for n answers could be split, if decode engines can share a load among
    them.
    """
    asked = {name: raw for name, raw in fields.items() if name in _LOOKED_AT[api]}
    return _odd_reason(api, asked, shares=True) is None


def _odd_reason(api: Api, asked: Fields, *, shares: bool = False) -> SingleEngineReason | None:
    plain = _PLAIN[api]
    values: _Values = {name: _value(bytes(raw)) for name, raw in asked.items()}
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
        # of several the first in the table
        return next(reason for _, reason in plain.values() if reason in odd)
    return None if _FIT[api](values) else SingleEngineReason.UNUSUAL


def _with_sampling(values: _Values) -> _Values:
    """Show the sampling parameters among the others, by names with a dot."""
    sampling = values.get(SAMPLING)
    if not isinstance(sampling, dict):
        return values
    inner = cast("dict[str, _Json]", sampling)
    return {**values, **{f"{SAMPLING}.{name}": value for name, value in inner.items()}}


def _value(text: bytes) -> _Json:
    """Decode a value; what cannot be decoded, or is too long to be, is an odd string, which is
    plain for no field.
    """
    if len(text) > _VALUE_MOST:
        return "?"
    if text.isdigit() and len(text) < _LONG:
        return int(text)
    try:
        return _WORDS[text] if text in _WORDS else decode(text, object)
    except NotJson:
        return "?"


def _is_one_prompt(raw: msgspec.Raw | None) -> bool:
    """Tell one prompt (text, or a list of token ids) from several, without decoding a long list of
    ids.
    """
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


def _none(value: _Json) -> bool:
    return value is None


def _one(value: _Json) -> bool:
    return value is None or (type(value) is int and value == 1)


def _false(value: _Json) -> bool:
    return value is False


def _no(value: _Json) -> bool:
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
    """Tell tools that the client runs from those that the engine runs itself, between two
    generations.
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
    """The two refinements of logprobs are refused without it."""
    refined = values.get("top_logprobs") or values.get("logprob_token_ids")
    return not refined or values.get("logprobs") not in (None, False)


def _stream_options_fit(values: _Values) -> bool:
    return not values.get("stream_options") or values.get("stream") is True


def _sampling_fits(values: _Values) -> bool:
    """They are required, and of two limits the lower one must be below the higher."""
    least = values.get(f"{SAMPLING}.min_tokens", 0)
    most = values.get(f"{SAMPLING}.max_tokens")
    if not isinstance(values.get(SAMPLING), dict) or not _stream_options_fit(values):
        return False
    return most is None or (type(least) is int and type(most) is int and least <= most)


def _responses_fit(_: _Values) -> bool:
    return True


def _messages_fit(values: _Values) -> bool:
    """The limit is required, and that of thinking must be below it: the decode engine checks both,
    prefill neither.
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
    # these would be wrong
    "prompt_embeds": (_none, SingleEngineReason.EMBEDS),
    "n": (_one, SingleEngineReason.N),
    "best_of": (_one, SingleEngineReason.BEST_OF),
    "use_beam_search": (_false, SingleEngineReason.BEAM),
    "echo": (_no, SingleEngineReason.ECHO),
    "prompt_logprobs": (_none, SingleEngineReason.PROMPT_LOGPROBS),
    "max_tokens": (_two_or_more, SingleEngineReason.FEW_TOKENS),
    "max_completion_tokens": (_two_or_more, SingleEngineReason.FEW_TOKENS),
    "truncate_prompt_tokens": (_none, SingleEngineReason.TRUNCATED),
    # these the prefill engine cannot check for us
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
        "previous_response_id": (_none, SingleEngineReason.STORED),
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
        f"{SAMPLING}.n": (_one, SingleEngineReason.N),
        f"{SAMPLING}.prompt_logprobs": (_none, SingleEngineReason.PROMPT_LOGPROBS),
        f"{SAMPLING}.prompt_logprob_token_ids": (_none, SingleEngineReason.PROMPT_LOGPROBS),
        f"{SAMPLING}.max_tokens": (_two_or_more, SingleEngineReason.FEW_TOKENS),
        f"{SAMPLING}.min_tokens": (_natural, SingleEngineReason.UNUSUAL),
        "stream": (_switch, SingleEngineReason.UNUSUAL),
        "stream_options": (_switches, SingleEngineReason.UNUSUAL),
    },
}
_N: Final = dict.fromkeys(Api, "n") | {Api.GENERATE: f"{SAMPLING}.n"}
# What else is looked at, and what must be right about several values together.
_BESIDE: Final[Mapping[Api, tuple[str, ...]]] = {
    Api.COMPLETIONS: ("logprobs",),
    Api.CHAT: ("logprobs",),
    Api.RESPONSES: (),
    Api.MESSAGES: ("thinking",),
    Api.GENERATE: (),
}
_LOOKED_AT: Final[Mapping[Api, frozenset[str]]] = {
    api: frozenset(name.partition(".")[0] for name in (*_PLAIN[api], *_BESIDE[api])) for api in Api
}
_FIT: Final[Mapping[Api, Callable[[_Values], bool]]] = {
    Api.COMPLETIONS: _completions_fit,
    Api.CHAT: _chat_fits,
    Api.RESPONSES: _responses_fit,
    Api.MESSAGES: _messages_fit,
    Api.GENERATE: _sampling_fits,
}
