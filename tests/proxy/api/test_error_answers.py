"""What routes say of their errors costs nothing when a router starts, and is in the document all the same."""

import pytest
from fastapi.routing import APIRoute

from pdrelay_proxy.api.error_answers import add_schemas, error_answers
from pdrelay_proxy.api.schemas import ErrorResponse, OperatorError, ServedModels
from pdrelay_proxy.app import build
from pdrelay_proxy.settings import Settings

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("admin_port", [None, 9])
def test_no_route_has_a_model_made_for_its_errors(admin_port):
    """With one for each of 300 errors, and each twice, a router took a third longer to start."""
    built = build(Settings(admin_port=admin_port))
    routes = [one for app in (built.app, built.admin_app) if app is not None for one in app.routes]
    described = [one for one in routes if isinstance(one, APIRoute) and one.responses]

    assert len(described) >= 30
    assert [one.path for one in described if one.response_fields] == []


def test_a_document_has_the_schemas_that_its_paths_name_and_no_others():
    """And those that these name."""
    found = {"paths": {"/": {"get": {"responses": error_answers(ErrorResponse, {400: "no", "4XX": "never"})}}}}
    add_schemas(found)

    assert list(found["components"]["schemas"]) == ["ErrorDetail", "ErrorResponse"]
    reference = found["components"]["schemas"]["ErrorResponse"]["properties"]["error"]["$ref"]
    assert reference == "#/components/schemas/ErrorDetail"


def test_what_a_document_has_already_stays():
    found = {"paths": {"/": error_answers(OperatorError, {404: "no"})}, "components": {"schemas": {"A": {}}}}
    add_schemas(found)

    assert list(found["components"]["schemas"]) == ["A", "OperatorError"]


def test_a_model_that_the_document_would_not_have_is_refused():
    with pytest.raises(ValueError, match="ServedModels is not in the document"):
        error_answers(ServedModels, {400: "no"})
