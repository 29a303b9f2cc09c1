"""What the router says of itself in /openapi.json: every route that clients can reach, and to operators also theirs."""

import httpx
import pytest
from fastapi import FastAPI

from xpyd_proxy.api.openapi import PATH, openapi_routes
from xpyd_proxy.app import build
from xpyd_proxy.core.admission.keys import Keyring, Keys
from xpyd_proxy.core.model import Api
from xpyd_proxy.core.protocol.endpoints import ENDPOINTS, Kind
from xpyd_proxy.settings import Settings

ADMIN = "sesame"
VERBS = ("add", "remove", "drain", "undrain", "explain")
OPERATORS = {"/status", "/instances", *(f"/instances/{verb}" for verb in VERBS)}
ERRORS = {"400", "401", "404", "413", "415", "429", "500", "502", "503", "504"}


@pytest.fixture(scope="module")
def app():
    return build(Settings(admin_key=ADMIN)).app


async def document(app, *, keyring=None, headers=None):
    """Get it as a client does, from an application that has nothing else."""
    served = FastAPI(openapi_url=None)
    served.include_router(openapi_routes(app, ADMIN, keyring or Keyring(None)))
    transport = httpx.ASGITransport(served)
    async with httpx.AsyncClient(transport=transport, base_url="http://router", headers=headers) as client:
        response = await client.get(PATH)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    return response.json()


def operations(found):
    return [(path, method, one) for path, item in found["paths"].items() for method, one in item.items()]


def references(part):
    """Yield every $ref in a document."""
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "$ref":
                yield value
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


async def test_every_route_for_clients_is_described(app):
    """Those that go past FastAPI, too: it knows nothing of them."""
    found = await document(app)

    assert found["openapi"].startswith("3.1")
    assert found["info"]["version"]
    for path in ENDPOINTS:
        operation = found["paths"][path]["post"]
        assert operation["requestBody"]["required"]
        assert operation["responses"].keys() == {"200"} | ERRORS
        assert operation["responses"]["200"]["headers"].keys() == {"X-Request-Id", "Server-Timing"}
    assert {"/v1/models", "/health", "/ready", "/metrics"} <= found["paths"].keys()


@pytest.mark.parametrize("api", Api)
async def test_what_generates_text_takes_json_and_may_stream(app, api):
    """With the fields that the router looks at, and any other."""
    operation = (await document(app))["paths"][api.value]["post"]

    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["additionalProperties"] is True
    assert {"model", "stream"} <= schema["properties"].keys()
    assert set(schema["required"]) <= schema["properties"].keys()
    assert operation["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}


async def test_a_form_is_a_form(app):
    """With a file in it."""
    found = await document(app)

    for path in (path for path, kind in ENDPOINTS.items() if kind is Kind.FORM):
        content = found["paths"][path]["post"]["requestBody"]["content"]
        assert "file" in content["multipart/form-data"]["schema"]["properties"]


async def test_every_error_has_the_shape_that_clients_know(app):
    """The one that the router answers with."""
    found = await document(app)

    schema = {"$ref": "#/components/schemas/Error"}
    for path in ENDPOINTS:
        answers = found["paths"][path]["post"]["responses"]
        assert all(answers[status]["content"]["application/json"]["schema"] == schema for status in ERRORS)
    properties = found["components"]["schemas"]["Error"]["properties"]["error"]["properties"]
    assert properties.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("headers", [{}, {"X-Api-Key": ADMIN}], ids=["anybody", "operator"])
async def test_the_document_is_sound(app, headers):
    """What it refers to is in it, schemes of security included, and no two operations have one name."""
    found = await document(app, headers=headers, keyring=Keyring(Keys.parse("me:secret", "keys")))

    for reference in references(found):
        part = found
        for name in reference.removeprefix("#/").split("/"):
            part = part[name]
    names = [operation["operationId"] for _, _, operation in operations(found)]
    assert len(set(names)) == len(names)
    used = {name for _, _, one in operations(found) for wanted in one.get("security", ()) for name in wanted}
    assert used <= found["components"]["securitySchemes"].keys()


@pytest.mark.parametrize("headers", [{}, {"X-Api-Key": "wrong"}, {"X-Api-Key": ""}], ids=["none", "wrong", "empty"])
async def test_what_is_for_operators_is_shown_to_nobody_else(app, headers):
    """Not even its errors and its scheme."""
    found = await document(app, headers=headers)

    assert not OPERATORS & found["paths"].keys()
    assert "operator" not in found["components"]["securitySchemes"]
    assert "HTTPValidationError" not in str(found)


async def test_an_operator_sees_the_routes_for_operators(app):
    """And that they want the key."""
    found = await document(app, headers={"X-Api-Key": ADMIN})

    assert found["paths"].keys() >= OPERATORS
    for path, _, operation in operations(found):
        assert (operation.get("security") == [{"operator": []}]) == (path in OPERATORS)


@pytest.mark.parametrize("wanted", [True, False], ids=["keys", "no keys"])
async def test_a_key_is_asked_for_where_the_router_asks_for_one(app, wanted):
    """Either way of showing it will do; what is there for probes wants none."""
    found = await document(app, keyring=Keyring(Keys.parse("me:secret", "keys") if wanted else None))

    expected = [{"bearer": []}, {"key": []}] if wanted else None
    assert found["paths"]["/v1/completions"]["post"].get("security") == expected
    assert found["paths"]["/v1/models"]["get"].get("security") == expected
    assert found["paths"]["/metrics"]["get"].get("security") == expected
    assert found["paths"]["/health"]["get"].get("security") is None
