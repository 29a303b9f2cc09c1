"""vLLM's own schemas of the requests and answers of the two text endpoints, for the document.

They are in a file that ``tests/support/text_schemas.py`` writes: the router has no vLLM, and checks
nothing by them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

Part: TypeAlias = dict[str, Any]  # of an OpenAPI document
_REFERENCE: Final = re.compile(r"'#/components/schemas/(\w+)'")


class _File(msgspec.Struct, frozen=True):
    vllm: str
    schemas: Mapping[str, Part]


_FILE: Final = msgspec.json.decode(
    Path(__file__).with_name("text_schemas.json").read_bytes(), type=_File
)
VLLM: Final = _FILE.vllm  # the version that they are of
TEXT_SCHEMAS: Final = _FILE.schemas


def named_in(part: object) -> dict[str, Part]:
    """Return the schemas of the file that a part of a document names, and those that these name."""
    found: dict[str, Part] = {}
    waiting = [part]
    while waiting:
        for name in _REFERENCE.findall(str(waiting.pop())):
            if name in TEXT_SCHEMAS and name not in found:
                found[name] = TEXT_SCHEMAS[name]
                waiting.append(found[name])
    return found
