"""How urgent a request is, read as vLLM reads it (lower is earlier), and no more than its client may say."""

import re
from typing import Final

import msgspec

from xpyd_proxy.core.model import Headers, first_header
from xpyd_proxy.core.raw_json import NULL, Fields
from xpyd_proxy.errors import BadRequest

USUAL: Final = 0
_HEADER: Final = b"x-vllm-priority"
_FIELD: Final = "priority"
_IN_HEADER: Final = re.compile(rb"[ \t]*([+-]?[0-9]{1,18})[ \t]*")
_IN_BODY: Final = re.compile(rb"-?[0-9]{1,18}")


def limited(headers: Headers, fields: Fields, least: int) -> tuple[Headers, Fields, int]:
    """Return what engines may see of a request's headers and fields, and its priority: none is below ``least``.

    The header counts before the body, as in vLLM (entrypoints/generate/base/serving.py). One that is no number is left
    out: Python reads more numbers than we do. What needs no change is returned as it came.

    Raises:
        BadRequest: the body's priority is no whole number. pydantic would make one of a text or a float.
    """
    said = first_header(headers, _HEADER)
    if said is None and least <= USUAL and _FIELD not in fields:
        return headers, fields, USUAL
    raw = bytes(fields.get(_FIELD, NULL))
    if raw == b"null" and said is None and least <= USUAL:
        return headers, fields, USUAL
    if raw != b"null" and not _IN_BODY.fullmatch(raw):
        raise BadRequest("priority must be a whole number of at most 18 digits", param=_FIELD)
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
