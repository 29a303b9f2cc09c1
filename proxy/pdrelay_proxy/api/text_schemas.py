"""vLLM's own schemas of the requests and answers of the two text endpoints, for the document.

``tests/support/text_schemas.py`` writes their file: the router does not have vLLM, and checks
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
VLLM: Final = _FILE.vllm  # the version of the schemas
TEXT_SCHEMAS: Final = _FILE.schemas


def named_in(part: object) -> dict[str, Part]:
    """Return the file's schemas that a part of a document names, and those that these name."""
    schemas: dict[str, Part] = {}
    waiting = [part]
    while waiting:
        for name in _REFERENCE.findall(str(waiting.pop())):
            if name in TEXT_SCHEMAS and name not in schemas:
                schemas[name] = TEXT_SCHEMAS[name]
                waiting.append(schemas[name])
    return schemas
