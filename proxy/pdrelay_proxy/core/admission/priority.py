"""How urgent a request is, read as vLLM reads it (lower is earlier), and no more than its client
may say.
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
_EXACT_MOST: Final = 1e15  # up to here a float is the whole number that it says
_SWITCHES: Final = {b"false": 0, b"true": 1}


def limited(headers: Headers, fields: Fields, least: int) -> tuple[Headers, Fields, int]:
    """Return what engines may see of a request's headers and fields, and its priority: none is
    below ``least``.

    The header counts before the body, as in vLLM (entrypoints/generate/base/serving.py). One that
    is no number is left out: Python reads more numbers than we do. What needs no change is returned
    as it came.

    Raises:
        BadRequest: the body's priority is no whole number.
    """
    said = first_header(headers, _HEADER) if headers else None
    if said is None and least <= USUAL and _FIELD not in fields:
        return headers, fields, USUAL
    raw = bytes(fields.get(_FIELD, NULL))
    if raw == b"null" and said is None and least <= USUAL:
        return headers, fields, USUAL
    if raw != b"null" and not _IN_BODY.fullmatch(raw):
        raw = b"%d" % _whole(raw)
        fields = fields | {_FIELD: msgspec.Raw(raw)}
    found = None if said is None else _IN_HEADER.fullmatch(said)
    in_body = None if raw == b"null" else int(raw)
    asked = int(found[1]) if found is not None else USUAL if in_body is None else in_body
    priority = max(asked, least)
    if in_body is not None and in_body < least:
        fields = fields | {_FIELD: msgspec.Raw(b"%d" % least)}
    if said is not None and (found is None or priority != asked):
        headers = tuple(header for header in headers if header[0] != _HEADER)
        said = None if found is None else b"%d" % priority
        if said is not None:
            headers = (*headers, (_HEADER, said))
    if said is None and in_body is None and priority != USUAL:
        headers = (*headers, (_HEADER, b"%d" % priority))
    return headers, fields, priority


def _whole(raw: bytes) -> int:
    """Return the whole number that pydantic makes of a text, a float or a switch; raises
    BadRequest: it makes none.
    """
    if (written := _IN_TEXT.fullmatch(raw)) is not None:
        return int(written[1])
    if raw in _SWITCHES:
        return _SWITCHES[raw]
    value = float(raw) if _FLOAT.fullmatch(raw) else 0.5
    if not value.is_integer() or abs(value) > _EXACT_MOST:
        raise BadRequest("priority must be a whole number of at most 18 digits", param=_FIELD)
    return int(value)
