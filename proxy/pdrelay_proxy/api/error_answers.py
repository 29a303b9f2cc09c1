"""What a document says of errors, and the schemas that it names for them.

FastAPI makes a pydantic adapter for each answer of each route that has a model: 600 in a router, a
third of the time in which it starts. Errors are written by the router itself, so routes only name
their schema, and the document has it.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from pydantic import BaseModel

from pdrelay_proxy.api.endpoint_document import SHAPES
from pdrelay_proxy.api.schemas import AnthropicErrorResponse, ErrorResponse, OperatorError
from pdrelay_proxy.api.text_schemas import named_in

Answers: TypeAlias = dict[int | str, dict[str, Any]]  # of a route, by status: as FastAPI takes them
PLACE: Final = "#/components/schemas/"
# What each route may answer, whoever asks.
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
    """Describe answers with the body of a model, which must be one of the models here: status ->
    what it means.
    """
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
    """Add the schemas that the routes of a document name, and those that these name."""
    text = str(document["paths"])
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for model in _MODELS:
        if f"'{PLACE}{model.__name__}'" in text:
            schema = model.model_json_schema(mode="serialization", ref_template=PLACE + "{model}")
            for name, each in (*schema.pop("$defs", {}).items(), (model.__name__, schema)):
                schemas.setdefault(name, each)
    for name, shape in SHAPES.items():
        if f"'{PLACE}{name}'" in text:
            schemas.setdefault(name, shape)
    schemas |= named_in(document["paths"])
    document["components"]["schemas"] = dict(sorted(schemas.items()))
