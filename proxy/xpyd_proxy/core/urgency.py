"""How urgent a request is, read as vLLM reads it: lower is earlier."""

import re
from typing import Final

from xpyd_proxy.core.model import Headers
from xpyd_proxy.core.raw_json import Fields

USUAL: Final = 0
_WHOLE: Final = re.compile(rb"[ \t]*([+-]?[0-9]{1,18})[ \t]*")


def priority_of(headers: Headers, fields: Fields) -> int:
    """Return the number in X-Vllm-Priority or else in the body; one that is no number counts as none, as in vLLM."""
    header = next((value for name, value in headers if name == b"x-vllm-priority"), b"")
    for text in (header, bytes(fields.get("priority", b""))):
        if number := _WHOLE.fullmatch(text):
            return int(number[1])
    return USUAL
