"""A request's priority, parsed as vLLM does (lower is earlier), and limited to what its client may
ask for.
"""

import re
from typing import Final

import msgspec

from pdrelay_proxy.core.model import Headers, first_header
from pdrelay_proxy.core.raw_json import NULL, Fields
from pdrelay_proxy.errors import BadRequest

USUAL: Final = 0
_HEADER: Final = b"x-vllm-priority"
_FIELD: Final = "priority"
_IN_HEADER: Final = re.compile(rb"[ \t]*([+-]?[0-9]{1,18})[ \t]*")
_IN_BODY: Final = re.compile(rb"-?[0-9]{1,18}")
_IN_TEXT: Final = re.compile(rb'"[ \t]*([+-]?[0-9]{1,18})(?:\.0+)?[ \t]*"')
_FLOAT: Final = re.compile(rb"-?[0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,2})?")
_EXACT_MOST: Final = 1e15  # up to here a float represents every whole number
_SWITCHES: Final = {b"false": 0, b"true": 1}


def limited(headers: Headers, fields: Fields, least: int) -> tuple[Headers, Fields, int]:
    """Return the headers and fields of a request for engines, and its priority, which is never
    below ``least``.

    The header counts before the body, as in vLLM (entrypoints/generate/base/serving.py). A header
    that is no number is dropped: Python's int() accepts more forms than we do. Headers and fields
    that need no change are returned as they came.

    Raises:
        BadRequest: the body's priority is no whole number.
    """
    header_value = first_header(headers, _HEADER) if headers else None
    if header_value is None and least <= USUAL and _FIELD not in fields:
        return headers, fields, USUAL
    raw = bytes(fields.get(_FIELD, NULL))
    if raw == b"null" and header_value is None and least <= USUAL:
        return headers, fields, USUAL
    if raw != b"null" and not _IN_BODY.fullmatch(raw):
        raw = b"%d" % _whole(raw)
        fields = fields | {_FIELD: msgspec.Raw(raw)}
    header_match = None if header_value is None else _IN_HEADER.fullmatch(header_value)
    in_body = None if raw == b"null" else int(raw)
    requested = (
        int(header_match[1]) if header_match is not None else USUAL if in_body is None else in_body
    )
    priority = max(requested, least)
    if in_body is not None and in_body < least:
        fields = fields | {_FIELD: msgspec.Raw(b"%d" % least)}
    if header_value is not None and (header_match is None or priority != requested):
        headers = tuple(header for header in headers if header[0] != _HEADER)
        header_value = None if header_match is None else b"%d" % priority
        if header_value is not None:
            headers = (*headers, (_HEADER, header_value))
    if header_value is None and in_body is None and priority != USUAL:
        headers = (*headers, (_HEADER, b"%d" % priority))
    return headers, fields, priority


def _whole(raw: bytes) -> int:
    """Return the whole number that pydantic makes of a string, a float or a boolean; raises
    BadRequest: it makes none.
    """
    if (match := _IN_TEXT.fullmatch(raw)) is not None:
        return int(match[1])
    if raw in _SWITCHES:
        return _SWITCHES[raw]
    value = float(raw) if _FLOAT.fullmatch(raw) else 0.5
    if not value.is_integer() or abs(value) > _EXACT_MOST:
        raise BadRequest("priority must be a whole number of at most 18 digits", param=_FIELD)
    return int(value)
