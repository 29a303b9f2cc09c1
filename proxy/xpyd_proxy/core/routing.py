"""Which requests must not be split between two engines.

A split is right only while both engines make the same prompt out of the request, the prefill engine's one token is
all it makes, and one sequence on the decode engine reads the blocks. What does not fit is served by one decode engine
from start to end: slower, never wrong. The fields that the prefill leg drops or replaces need one more look, for the
prefill engine cannot refuse them any more and a decode engine that does (before it has parsed the body) leaves the
prefill engine's blocks pinned for a whole lease. So each has its plain values here; what is not plain goes to one
engine, which says what is wrong with it.
"""

from collections.abc import Callable, Mapping
from typing import Final, cast

import msgspec

from xpyd_proxy.core.model import Api, Solo
from xpyd_proxy.core.raw_json import Fields, NotJson, decode

_Json = object
_WHITESPACE: Final = b" \t\n\r"


def solo_reason(api: Api, fields: Fields) -> Solo | None:
    """Return why one engine must serve the request alone, or None when it can be split."""
    if api is Api.COMPLETIONS and not _is_one_prompt(fields.get("prompt")):
        return Solo.PROMPTS
    values = {name: _value(fields[name]) for name in (*_PLAIN, "logprobs") if name in fields}
    for name, (is_plain, reason) in _PLAIN.items():
        if name in values and not is_plain(values[name]):
            return reason
    return None if _logprobs_fit(api, values) and _stream_options_fit(values) else Solo.UNUSUAL


def _value(raw: msgspec.Raw) -> _Json:
    """Decode a value; what cannot be decoded is an odd string, which is plain for no field."""
    try:
        return decode(raw, object)
    except NotJson:
        return "?"


def _is_one_prompt(raw: msgspec.Raw | None) -> bool:
    """Tell one prompt (text, or a list of token ids) from several, without decoding a long list of ids."""
    if raw is None:
        return True  # the engine refuses it, or finds the prompt elsewhere (see prompt_embeds)
    text = bytes(raw)
    if not text.startswith(b"["):
        return True
    first = text[1:].lstrip(_WHITESPACE)[:1]
    if first.isdigit():
        return True
    return len(decode(text, list[msgspec.Raw])) == 1


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
        isinstance(value, list) and all(_is_int(item, least=0) for item in cast("list[_Json]", value))
    )


def _switches(value: _Json) -> bool:
    return value is None or (
        isinstance(value, dict) and all(_switch(item) for item in cast("dict[str, _Json]", value).values())
    )


def _logprobs_fit(api: Api, values: Mapping[str, _Json]) -> bool:
    """A count in completions, a switch in chat; its two refinements are refused without it."""
    logprobs = values.get("logprobs")
    is_plain = _count(logprobs) if api is Api.COMPLETIONS else _switch(logprobs)
    refined = values.get("top_logprobs") or values.get("logprob_token_ids")
    return is_plain and (not refined or logprobs not in (None, False))


def _stream_options_fit(values: Mapping[str, _Json]) -> bool:
    return not values.get("stream_options") or values.get("stream") is True


_PLAIN: Final[Mapping[str, tuple[Callable[[_Json], bool], Solo]]] = {
    # these would be wrong
    "prompt_embeds": (_none, Solo.EMBEDS),
    "n": (_one, Solo.N),
    "best_of": (_one, Solo.BEST_OF),
    "use_beam_search": (_false, Solo.BEAM),
    "echo": (_no, Solo.ECHO),
    "prompt_logprobs": (_none, Solo.PROMPT_LOGPROBS),
    "max_tokens": (_two_or_more, Solo.FEW_TOKENS),
    "max_completion_tokens": (_two_or_more, Solo.FEW_TOKENS),
    "truncate_prompt_tokens": (_none, Solo.TRUNCATED),
    # these the prefill engine cannot check for us
    "stream": (_switch, Solo.UNUSUAL),
    "stream_options": (_switches, Solo.UNUSUAL),
    "min_tokens": (_natural, Solo.UNUSUAL),
    "top_logprobs": (_count, Solo.UNUSUAL),
    "logprob_token_ids": (_ids, Solo.UNUSUAL),
}
