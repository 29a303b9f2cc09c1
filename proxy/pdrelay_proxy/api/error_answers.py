"""The document's errors, and their schemas.

FastAPI makes a pydantic adapter for each answer with a model of each route: 600 in a router, a
third of its start time. The router itself writes errors, so routes only name their schema, and the
document has it.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from pydantic import BaseModel

from pdrelay_proxy.api.endpoint_document import SHAPES
from pdrelay_proxy.api.schemas import AnthropicErrorResponse, ErrorResponse, OperatorError
from pdrelay_proxy.api.text_schemas import named_in

Answers: TypeAlias = dict[int | str, dict[str, Any]]  # of a route, by status: as FastAPI takes them
PLACE: Final = "#/components/schemas/"
# Answers that every route may give.
ANY_ROUTE: Final[Mapping[int | str, str]] = {
    421: "The router has no such name: the Host header",
    500: "The router failed",
}
# Headers of errors, by their statuses.
_HEADERS: Final[Mapping[int | str, Mapping[str, str]]] = {
    401: {"WWW-Authenticate": "How to show a key"},
    429: {"Retry-After": "Seconds after which it is worth another try"},
    503: {"Retry-After": "Seconds after which it is worth another try, if that is known"},
}
_MODELS: Final = (ErrorResponse, AnthropicErrorResponse, OperatorError)


def error_answers(model: type[BaseModel], described: Mapping[int | str, str]) -> Answers:
    """Return descriptions of answers, by status, with a model of this module as body."""
    if model not in _MODELS:
        raise ValueError(
            f"{model.__name__} is not in the document: it must be one of the models of "
            f"error_answers.py"
        )
    content = {"application/json": {"schema": {"$ref": PLACE + model.__name__}}}
    answers: Answers = {
        status: {"description": text, "content": content} for status, text in described.items()
    }
    for status, headers in _HEADERS.items():
        if status in answers:
            shown = {
                name: {"description": text, "schema": {"type": "string"}}
                for name, text in headers.items()
            }
            answers[status]["headers"] = shown
    return answers


def add_schemas(document: dict[str, Any]) -> None:
    """Add the schemas that a document's routes name, and those that these name."""
    text = str(document["paths"])
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for model in _MODELS:
        if f"'{PLACE}{model.__name__}'" in text:
            schema = model.model_json_schema(mode="serialization", ref_template=PLACE + "{model}")
            for name, definition in (*schema.pop("$defs", {}).items(), (model.__name__, schema)):
                schemas.setdefault(name, definition)
    for name, shape in SHAPES.items():
        if f"'{PLACE}{name}'" in text:
            schemas.setdefault(name, shape)
    schemas |= named_in(document["paths"])
    document["components"]["schemas"] = dict(sorted(schemas.items()))
