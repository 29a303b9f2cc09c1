"""Reads the usage in engines' answers: a prompt's tokens, and how many were cached.

Both legs of a request must report the same number of prompt tokens. If they do not, the engines
have made different prompts of one request (another template, another tokenizer, another version of
the model's files), and the decode engine has read a KV cache that does not belong to its prompt.

For cached tokens the prefill engine's number counts, as clients would get it from a single engine:
at a decode engine nearly all of a prompt is cached, for its KV has come from elsewhere. Clients are
billed by it.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.raw_json import NULL, Fields, encode, maybe, to_raw
from pdrelay_proxy.core.schemas import RawUsageAnswer, Usage, UsageAnswer

_DATA: Final = b"data:"
_RETURN: Final = 13  # ends a line, too
# as vLLM writes JSON, and as Python does; chunks without a usage have null, or nothing
_MARKS: Final = (b'"usage":{', b'"usage": {')
# The fields of a usage that depend on the cache of the engine that computed the prompt.
_OF_CACHE: Final[Mapping[Api, tuple[str, ...]]] = {
    Api.COMPLETIONS: ("prompt_tokens_details",),
    Api.CHAT: ("prompt_tokens_details",),
    Api.RESPONSES: ("input_tokens_details",),
    Api.MESSAGES: ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
    Api.GENERATE: ("prompt_tokens_details",),
}
# A usage without these bytes has no cached tokens; Anthropic's has plain numbers. vLLM's null is no
# object.
_CACHE_MARKS: Final[Mapping[Api, tuple[bytes, bytes]]] = {
    api: (b'"input_tokens":', b'"cache_read_input_tokens":')
    if api is Api.MESSAGES
    else (b'_tokens_details":{', b'_tokens_details": {')
    for api in _OF_CACHE
}
_INPUT: Final = "input_tokens"  # of Anthropic's: what of the prompt is not said to be cached
# by API: the same fields, if nothing is said; the input is all of the prompt then
_UNSAID: Final[Mapping[Api, Fields]] = {
    api: dict.fromkeys(names, NULL) for api, names in _OF_CACHE.items()
}
_HIDDEN: Final = tuple([fields for fields in _UNSAID.values() if _INPUT not in fields])
_DETAILS: Final = b"_tokens_details"  # in the name of each of these fields
_AROUND: Final = ("response", "message")  # members of events that have a usage inside


def prompt_tokens(answer: bytes) -> int | None:
    """Return the prompt's tokens in an answer, or in one event's data; None: unknown."""
    parsed = maybe(answer, UsageAnswer)
    if parsed is None:
        return None
    if parsed.message is not None and parsed.message.usage is not None:
        return prompt_of(parsed.message.usage) or None  # vLLM writes 0 while it is unknown
    usage = parsed.usage or (parsed.response and parsed.response.usage)
    return prompt_of(usage) if usage else None


def counted(usage: msgspec.Raw) -> int | None:
    """Return the prompt's tokens in the ``usage`` of an answer; None: it has no number."""
    parsed = maybe(usage, Usage)
    return prompt_of(parsed) if parsed else None


def prompt_tokens_in(events: bytes) -> int | None:
    """Return the prompt's tokens in whole lines of a stream; None: they have no number."""
    mark_at = _find(events, _MARKS)
    while mark_at >= 0:
        start = events.rfind(b"\n", 0, mark_at) + 1
        end = events.find(b"\n", mark_at)
        line = events[start : len(events) if end < 0 else end]
        parts = (
            [line]
            if _RETURN not in line
            else [part for part in line.splitlines() if _find(part, _MARKS) >= 0]
        )
        for part in parts:
            if (
                part[: len(_DATA)] == _DATA
                and (tokens := prompt_tokens(part[len(_DATA) :])) is not None
            ):
                return tokens
        mark_at = -1 if end < 0 else _find(events, _MARKS, end)
    return None


def _find(text: bytes, marks: tuple[bytes, bytes], start: int = 0) -> int:
    """Return where the first mark is, else where the second is; -1: there is none."""
    at = text.find(marks[0], start)
    return at if at >= 0 else text.find(marks[1], start)


def prompt_of(usage: Usage) -> int | None:
    """Return the length of the whole prompt."""
    reported = usage.prompt_tokens
    if reported is not None or usage.input_tokens is None:
        return reported
    return (
        usage.input_tokens
        + (usage.cache_read_input_tokens or 0)
        + (usage.cache_creation_input_tokens or 0)
    )


def cache_usage(api: Api, answer: bytes, *, hides: bool = False) -> Fields | None:
    """Return the cache fields of a prefill engine's usage; None: a decode engine's stay.

    ``hides``: if it has none, a decode engine's are its own, and no client's: they become null.
    """
    if _find(answer, _CACHE_MARKS[api]) < 0 or _find(answer, _MARKS) < 0:
        return _UNSAID.get(api) if hides else None
    return _of_cache(api, answer, hides=hides)


def _of_cache(api: Api, answer: bytes, *, hides: bool) -> Fields | None:
    parsed = maybe(answer, RawUsageAnswer)
    usage = (None if parsed is None else maybe(parsed.usage, Fields)) or {}
    names = _OF_CACHE[api]
    if any([usage.get(name, NULL) != NULL for name in names if name != _INPUT]):  # noqa: C419 (compiled, a generator takes longer)
        return {name: usage[name] for name in names if name in usage}
    return {name: usage.get(name, NULL) for name in names} if hides and usage else None


def with_cache_usage(answer: bytes, cache_fields: Fields) -> bytes:
    """Return an answer, or the data of one event, with these cache fields in its usage; unchanged
    without a usage, or if that says the same.
    """
    if _has_nothing_for(answer, cache_fields):
        return answer
    fields = maybe(answer, Fields)
    if fields is None:
        return answer
    is_other = False
    if usage := _changed(fields, cache_fields):
        fields["usage"] = usage
        is_other = True
    for name in _AROUND:
        inner = maybe(fields.get(name, NULL), Fields)
        if inner and (usage := _changed(inner, cache_fields)):
            fields[name] = to_raw(inner | {"usage": usage})
            is_other = True
    return encode(fields) if is_other else answer


def _has_nothing_for(answer: bytes, cache_fields: Fields) -> bool:
    """Return whether the fields hide what an answer does not tell: to read it would cost more."""
    return cache_fields in _HIDDEN and answer.find(_DETAILS) < 0


def _changed(fields: Fields, cache_fields: Fields) -> msgspec.Raw | None:
    """Return an object's usage with these cache fields; None: it has none, or the same."""
    usage = maybe(fields.get("usage", NULL), Fields)
    if not usage:
        return None
    if cache_fields.get(_INPUT) == NULL:
        parsed = maybe(fields["usage"], Usage)
        read = None if parsed is None else prompt_of(parsed)
        cache_fields = cache_fields | {_INPUT: msgspec.Raw(b"%d" % (read or 0))}
    others = {name: value for name, value in cache_fields.items() if usage.get(name, NULL) != value}
    return to_raw(usage | others) if others else None


def usage_alone(answer: bytes) -> bytes:
    """Return an answer that has only the usage of another one."""
    parsed = maybe(answer, RawUsageAnswer)
    return b"{}" if parsed is None else b'{"usage":%b}' % bytes(parsed.usage)


def with_cache_usage_in(events: bytes, cache_fields: Fields) -> bytes:
    """Return whole lines of a stream with these cache fields in their usages."""
    if _has_nothing_for(events, cache_fields) or _find(events, _MARKS) < 0:
        return events
    lines = events.splitlines(keepends=True)
    changed = b"".join(
        [
            _line_with(line, cache_fields)
            if line.startswith(_DATA) and _find(line, _MARKS) >= 0
            else line
            for line in lines
        ]
    )
    return events if changed == events else changed


def _line_with(line: bytes, cache_fields: Fields) -> bytes:
    data = line[len(_DATA) :]
    stripped = data.strip()
    changed = with_cache_usage(stripped, cache_fields)
    return (
        line if changed is stripped else _DATA + b" " + changed + line[len(line.rstrip(b"\r\n")) :]
    )
