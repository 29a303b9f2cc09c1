"""Filters engines' answers for clients: some content types pass, and no ``kv_transfer_params``.

Those name the memory of a prefill engine. vLLM's answers have a field for them, null from a decode
engine of 0.32; from 0.33 on they are in the last event of a stream, too. A line without their name
costs one search.
"""

import json
import re
from typing import Final

import msgspec

from pdrelay_proxy.core.one_line import shortened
from pdrelay_proxy.core.protocol.object_scan import without_name
from pdrelay_proxy.core.raw_json import NotJson, decode, maybe, value_at
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
_QUOTED: Final = b'"kv_transfer_params"'
# such a letter as an escape, and no backslash that is escaped itself
_ESCAPED: Final = re.compile(rb"(?<!\\)(?:\\\\)*" + _LETTER.pattern)
_COMMA: Final = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*")
_WHITESPACE: Final = b" \t\r\n"
_DECODER: Final = json.JSONDecoder(strict=False)  # it says where a value ends


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
            f"{engine} answered with the content type {shortened(shown, 100)!r}, which is not passed on"
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
        return _without(body)
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
            return b"data: " + _without(text) + b"\n"
        except NotJson:
            pass  # as below
    raise AnswerRefused(
        f"{engine} sent kv_transfer_params in a line of its stream that is not JSON"
    )


def _without(text: bytes) -> bytes:
    """Return JSON without the parameters, however deep they are; all else stays as it was written.

    Raises NotJson.

    A client can have megabytes of JSON repeated in its answer, and they must not hold up all
    requests: nothing is decoded but the parameters themselves.
    """
    if _ESCAPED.search(text) is None:
        try:
            decode(text, msgspec.Raw)
            return _cut(text)
        except (ValueError, RecursionError):
            pass  # no JSON, or nested deeper, or with longer numbers, than parsers read
    return without_name(text, _NAME)


def _cut(text: bytes) -> bytes:
    """Cut the parameters out of JSON whose names have no escapes."""
    characters = ""
    kept: list[bytes] = []
    end = 0  # of what is kept or cut so far
    at = text.find(_QUOTED)
    while at >= 0:
        begin = value_at(text, at + len(_QUOTED))
        if begin < 0 or text[at - 1] == _BACKSLASH:  # a value, or the end of another name
            at = text.find(_QUOTED, at + 1)
            continue
        # a character for each byte, whatever it is
        characters = characters or text.decode("latin-1")
        value_end: int = _DECODER.raw_decode(characters, begin)[1]
        before = text[end:at].rstrip(_WHITESPACE)
        if before.endswith(b","):
            kept.append(before[:-1])
            end = value_end
        else:  # the first member: the comma behind it goes, too
            kept.append(text[end:at])
            comma = _COMMA.match(text, value_end)
            end = value_end if comma is None else comma.end()
        at = text.find(_QUOTED, end)
    return b"".join([*kept, text[end:]])
