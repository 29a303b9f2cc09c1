"""Asks for the usage of a stream whose client did not, and keeps it from that client.

Tokens are counted by it: an event may have several, with speculative decoding (drafts) or
vLLM's --stream-interval.
"""

from typing import Final

import msgspec

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.raw_json import FALSE, NULL, TRUE, Fields, maybe, to_raw
from pdrelay_proxy.core.schemas import UsageEvent

_APIS: Final = frozenset({Api.COMPLETIONS, Api.CHAT})  # the others always have it
_OPTIONS: Final = "stream_options"
_YES: Final = frozenset({"1", "on", "t", "true", "y", "yes"})  # for pydantic, in any case
_NO: Final = frozenset({"0", "off", "f", "false", "n", "no"})
_ASKED: Final[Fields] = {"include_usage": TRUE, "continuous_usage_stats": FALSE}
_DATA: Final = b"data:"
# of the event that has nothing but the usage: as vLLM writes JSON, and as Python does
_MARKS: Final = (b'"choices":[]', b'"choices": []')


def asking_for_usage(api: Api, fields: Fields) -> Fields | None:
    """Return the fields of a request for a stream with its usage; None: its client has asked, or it
    is no stream without.
    """
    if api not in _APIS or not _boolean(fields.get("stream", NULL)):
        return None
    options = maybe(fields.get(_OPTIONS, NULL), Fields)
    if options is None and fields.get(_OPTIONS, NULL) != NULL:
        return None  # the engine refuses it
    options = options or {}
    given = [_boolean(options.get(name, NULL)) for name in _ASKED]
    if given[0] or None in given:
        return None
    return fields | {_OPTIONS: to_raw(options | _ASKED)}


def _boolean(value: msgspec.Raw) -> bool | None:
    """Read a boolean as vLLM's pydantic does; None: it refuses the value."""
    if value is NULL or value == TRUE:
        return value == TRUE
    read = maybe(value, object)
    if isinstance(read, str):
        word = read.lower()
        return True if word in _YES else False if word in _NO else None
    return bool(read) if read is None or read in (0, 1) else None


def without_usage(lines: bytes) -> bytes:
    """Return whole lines of a stream without the event that has nothing but its usage."""
    if lines.find(_MARKS[0]) < 0 and lines.find(_MARKS[1]) < 0:
        return lines
    kept = list[bytes]()
    is_hidden = False
    for line in lines.splitlines(keepends=True):
        if is_hidden and not line.strip():
            is_hidden = False  # the empty line that ends it
        elif not (is_hidden := _is_usage(line)):
            kept.append(line)
    return b"".join(kept)


def _is_usage(line: bytes) -> bool:
    event = maybe(line[len(_DATA) :], UsageEvent) if line.startswith(_DATA) else None
    return event is not None and not event.choices
