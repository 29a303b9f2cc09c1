"""What engines say of a prompt: how many tokens it has, and how many of them they had in their
caches.

Of the tokens both legs of a request must say the same.

If they do not, the engines have made different prompts out of one request (another template,
another tokenizer, another version of the model's files), and the decode engine has read a KV cache
that does not belong to its prompt.

Of the caches the prefill engine's word counts, as it is that of one engine: to a decode engine
nearly all of a prompt is cached, for the KV has come from elsewhere. Clients are billed by it.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.raw_json import NULL, Fields, encode, maybe
from pdrelay_proxy.core.schemas import RawUsageAnswer, Usage, UsageAnswer

_DATA: Final = b"data:"
_RETURN: Final = 13  # ends a line, too
_MARK: Final = b'"usage":{'  # vLLM leaves the field out of the chunks that have none
# What of an answer's usage depends on the cache of the engine that has computed the prompt.
_OF_CACHE: Final[Mapping[Api, tuple[str, ...]]] = {
    Api.COMPLETIONS: ("prompt_tokens_details",),
    Api.CHAT: ("prompt_tokens_details",),
    Api.RESPONSES: ("input_tokens_details",),
    Api.MESSAGES: ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
    Api.GENERATE: ("prompt_tokens_details",),
}
# Without these bytes a usage says nothing of caches; Anthropic's has plain numbers. vLLM's null is
# no object.
_CACHE_MARKS: Final[Mapping[Api, bytes]] = {
    api: b'"input_tokens":' if api is Api.MESSAGES else b'_tokens_details":{' for api in _OF_CACHE
}
_AROUND: Final = ("response", "message")  # objects of events that have a usage inside


def prompt_tokens(answer: bytes) -> int | None:
    """Return what an answer, or the data of one event, says about its prompt; None: nothing."""
    said = maybe(answer, UsageAnswer)
    if said is None:
        return None
    if said.message is not None and said.message.usage is not None:
        return prompt_of(said.message.usage) or None  # vLLM writes 0 where it does not know yet
    usage = said.usage or (said.response and said.response.usage)
    return prompt_of(usage) if usage else None


def counted(usage: msgspec.Raw) -> int | None:
    """Return what the ``usage`` of an answer says about its prompt; None: nothing."""
    found = maybe(usage, Usage)
    return prompt_of(found) if found else None


def prompt_tokens_in(events: bytes) -> int | None:
    """Return what whole lines of a stream say about the prompt; None: nothing."""
    at = events.find(_MARK)
    while at >= 0:
        start = events.rfind(b"\n", 0, at) + 1
        end = events.find(b"\n", at)
        line = events[start : len(events) if end < 0 else end]
        parts = (
            [line]
            if _RETURN not in line
            else [part for part in line.splitlines() if part.find(_MARK) >= 0]
        )
        for part in parts:
            if (
                part[: len(_DATA)] == _DATA
                and (found := prompt_tokens(part[len(_DATA) :])) is not None
            ):
                return found
        at = -1 if end < 0 else events.find(_MARK, end)
    return None


def prompt_of(usage: Usage) -> int | None:
    """Return the length of the whole prompt."""
    said = usage.prompt_tokens
    if said is not None or usage.input_tokens is None:
        return said
    return (
        usage.input_tokens
        + (usage.cache_read_input_tokens or 0)
        + (usage.cache_creation_input_tokens or 0)
    )


def cache_usage(api: Api, answer: bytes) -> Fields | None:
    """Return what a prefill engine's answer says of its cache, in the fields of its usage; None:
    nothing.
    """
    return (
        None
        if answer.find(_CACHE_MARKS[api]) < 0 or answer.find(_MARK) < 0
        else _of_cache(api, answer)
    )


def _of_cache(api: Api, answer: bytes) -> Fields | None:
    said = maybe(answer, RawUsageAnswer)
    usage = None if said is None else maybe(said.usage, Fields)
    found = {name: usage[name] for name in _OF_CACHE[api] if name in usage} if usage else {}
    return found if any(value != NULL for value in found.values()) else None


def with_cache_usage(answer: bytes, said: Fields) -> bytes:
    """Return an answer, or the data of one event, whose usage says this of the cache; without a
    usage as it is.
    """
    fields = maybe(answer, Fields)
    if fields is None:
        return answer
    is_other = False
    if usage := maybe(fields.get("usage", NULL), Fields):
        fields["usage"] = msgspec.Raw(encode(usage | said))
        is_other = True
    for name in _AROUND:
        inside = maybe(fields.get(name, NULL), Fields)
        if inside and (usage := maybe(inside.get("usage", NULL), Fields)):
            fields[name] = msgspec.Raw(
                encode(inside | {"usage": msgspec.Raw(encode(usage | said))})
            )
            is_other = True
    return encode(fields) if is_other else answer


def usage_alone(answer: bytes) -> bytes:
    """Return an answer that has nothing but the usage of another one."""
    said = maybe(answer, RawUsageAnswer)
    return b"{}" if said is None else b'{"usage":%b}' % bytes(said.usage)


def with_cache_usage_in(events: bytes, said: Fields) -> bytes:
    """Return whole lines of a stream whose usages say this of the cache."""
    if events.find(_MARK) < 0:
        return events
    lines = events.splitlines(keepends=True)
    return b"".join(
        [
            _line_with(line, said) if _MARK in line and line.startswith(_DATA) else line
            for line in lines
        ]
    )


def _line_with(line: bytes, said: Fields) -> bytes:
    data = line[len(_DATA) :]
    found = data.strip()
    told = with_cache_usage(found, said)
    return line if told is found else _DATA + b" " + told + line[len(line.rstrip(b"\r\n")) :]
