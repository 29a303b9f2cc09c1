"""Filters engines' answers for clients: some content types pass, and no ``kv_transfer_params``.

Those name the memory of a prefill engine. vLLM's answers have a field for them, null from a decode
engine of 0.32; from 0.33 on they are in the last event of a stream, too. A line without their name
costs one search.
"""

import re
from typing import Final

import msgspec

from pdrelay_proxy.core.protocol.object_scan import without_name
from pdrelay_proxy.core.raw_json import Fields, NotJson, decode, encode, maybe
from pdrelay_proxy.errors import AnswerRefused, EngineError

# JSON, streams, audio; texts of transcriptions; and the bytes of /pooling
# (vllm/entrypoints/pooling/utils.py). A comma would make a browser take the last of several types
# (WHATWG Fetch, "extract a MIME type").
_PASSED: Final = re.compile(
    rb"(?:application/(?:json|octet-stream)|text/(?:event-stream|plain)|audio/[-+.0-9a-z]+)[ "
    rb"\t]*(?:;[\t -+\--~]*)?",
    re.IGNORECASE,
)
_JSON: Final = b"application/json"
_EVENTS: Final = b"text/event-stream"
_STREAMS: Final = frozenset({_EVENTS, b"text/event-stream; charset=utf-8"})  # as engines write it
_NAME: Final = "kv_transfer_params"
_PARAMS: Final = b"kv_transfer_params"
_NONE: Final = b'"kv_transfer_params":null'
_NONE_LAST: Final = _NONE + b"}"
_ESCAPE: Final = b"\\u00"
_BACKSLASH: Final = 92  # a search for one byte by its number costs a tenth of one for several
_LETTER_V: Final = 118  # the rarest letter of that name
# of that name: no engine escapes these
_LETTER: Final = re.compile(rb"\\u00(?:5[Ff]|6[0-9A-Fa-f]|7[0-6])")
_DATA: Final = b"data:"
# levels of objects and arrays that are decoded one by one: deeper ones are scanned
_DEEP: Final = 32


def media_type(content_type: bytes) -> bytes:
    """Return a content type without its parameters, in lower case."""
    return content_type.partition(b";")[0].strip().lower()


def is_stream(content_type: bytes) -> bool:
    """Return whether a content type is that of server-sent events."""
    return content_type in _STREAMS or media_type(content_type) == _EVENTS


def check_type(engine: str, content_type: bytes) -> None:
    """Accept the content type of an answer for a client.

    Raises:
        EngineError: it is not one of those that are passed on.
    """
    if (
        content_type != _JSON
        and content_type not in _STREAMS
        and _PASSED.fullmatch(content_type) is None
    ):
        shown = content_type.decode("latin-1") or "none"
        raise EngineError(
            f"{engine} answered with the content type {shown[:100]!r}, which is not passed on"
        )


def is_half(content_type: bytes, body: bytes) -> bool:
    """Return whether the end of an answer is missing, as far as its type shows that."""
    return media_type(content_type) == _JSON and maybe(body, msgspec.Raw) is None


def clean_answer(engine: str, content_type: bytes, body: bytes) -> bytes:
    """Return a whole answer without the parameters.

    Raises:
        AnswerRefused: it may have them, and is not JSON.
    """
    if not may_name_params(body) or media_type(content_type) != _JSON:
        return body
    try:
        return _without(body, 0)
    except NotJson as exc:
        raise AnswerRefused(
            f"{engine} answered with kv_transfer_params in something that is not JSON"
        ) from exc


def clean_lines(engine: str, lines: bytes) -> bytes:
    """Return whole lines of a stream without the parameters.

    Raises:
        AnswerRefused: a line may have them, and is not data with a JSON object in it.
    """
    if not may_name_params(lines):
        return lines
    return b"".join([_clean_line(engine, line) for line in lines.split(b"\n")[:-1]])


def may_name_params(text: bytes) -> bool:
    """Return whether a text may have parameters that are not null.

    Their name may be written in escapes.
    """
    if _LETTER_V in text:  # most tokens do not have it
        at = text.find(_PARAMS)
        # Null at the very end, as engines write it, is the only occurrence.
        if at >= 0 and text[at - 1 :] != _NONE_LAST and text.count(_PARAMS) != text.count(_NONE):
            return True
    return _BACKSLASH in text and text.find(_ESCAPE) >= 0 and _LETTER.search(text) is not None


def _clean_line(engine: str, line: bytes) -> bytes:
    if not may_name_params(line):
        return line + b"\n"
    text = line[len(_DATA) :].strip()
    if line.startswith(_DATA) and text.startswith(b"{"):
        try:
            return b"data: " + _without(text, 0) + b"\n"
        except NotJson:
            pass  # as below
    raise AnswerRefused(
        f"{engine} sent kv_transfer_params in a line of its stream that is not JSON"
    )


def _without(text: bytes, depth: int) -> bytes:
    """Return a JSON value without the parameters, however deep they are; all other values stay as
    they were written.

    A body of 64 MiB that has them once must not hold up all requests: values without them are not
    decoded.
    """
    if not may_name_params(text):
        return text
    if depth > _DEEP:
        return without_name(text, _NAME)
    first = text.lstrip(b" \t\r\n")[:1]
    try:
        if first == b"{":
            fields: Fields = decode(text, Fields)
            fields.pop(_NAME, None)
            return encode(
                {
                    name: msgspec.Raw(_without(bytes(value), depth + 1))
                    for name, value in fields.items()
                }
            )
        if first == b"[":
            items = decode(text, list[msgspec.Raw])
            return b"[%b]" % b",".join([_without(bytes(item), depth + 1) for item in items])
    except NotJson:  # it may be nested deeper than msgspec reads
        return without_name(text, _NAME)
    return text
