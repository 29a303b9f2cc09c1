"""The document's text for each endpoint: its operation id, one sentence, its request and its
answer.

endpoint_document.json has all of it. The shapes are vLLM's, as far as clients use them; every
request and answer may have more fields. They check nothing: the engines do that.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

Part: TypeAlias = dict[str, Any]  # of an OpenAPI document
_KINDS: Final[Mapping[str, Part]] = {"any": {}, "array": {"type": "array", "items": {}}}


class EndpointText(msgspec.Struct, frozen=True):
    """The document's text for one endpoint."""

    operation: str
    summary: str
    answer: str  # the name of its schema
    request: str = ""  # the same; empty: its signature has it
    # a request that works; greedy, so that a small model answers sensibly. docs.html writes the
    # name of a served model in place of MODEL
    example: Part | None = None
    event: str = ""  # the name of the schema of a stream's events; empty: it has none


class _RequestText(msgspec.Struct, frozen=True):
    fields: Mapping[str, str]  # of vLLM 0.32 that the router does not read, by their types
    example: Part


class _EndpointTexts(msgspec.Struct, frozen=True):
    endpoints: Mapping[str, EndpointText]
    requests: Mapping[str, _RequestText]
    schemas: Mapping[str, Part]


_FILE: Final = msgspec.json.decode(
    Path(__file__).with_suffix(".json").read_bytes(), type=_EndpointTexts
)
ENDPOINT_TEXTS: Final = _FILE.endpoints
# Answers, and the requests of endpoints with one leg, by the names of their schemas;
# text_schemas.py has the others.
SHAPES: Final = _FILE.schemas


def describe_request(schema: Part, name: str) -> None:
    """Add vLLM's fields to a request's schema, and an example that works."""
    request = _FILE.requests[name]
    for kind, names in request.fields.items():
        for field in names.split():
            schema["properties"].setdefault(field, _KINDS.get(kind, {"type": kind}))
    schema["examples"] = [request.example]
