"""Tools that read /openapi.json use the router by it: ``make test-openapi``, which gives them an environment.

``PDRELAY_OPENAPI_SECONDS`` (60) is how long schemathesis tries what it makes of the document, ``PDRELAY_OPENAPI_SEED``
(17) where it begins.
"""

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from pdrelay_tools.simulated.rules import expected_text
from support.router_process import KEY, router_processes
from support.sim import fleet
from support.text_schemas import ROOT

TOOLS = ROOT / ".pdrelay/venvs/openapi/bin"
CALLS = Path(__file__).with_name("client_calls.py")
SECONDS = int(os.environ.get("PDRELAY_OPENAPI_SECONDS", "60"))
SEED = os.environ.get("PDRELAY_OPENAPI_SEED", "17")
CLIENT = "secret-of-mine-01"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,  # the tools take most of a minute
    pytest.mark.timeout(SECONDS * 3 + 240),
    pytest.mark.skipif(not (TOOLS / "python").exists(), reason="there are no tools for it: make test-openapi"),
]


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    """Where it is, and its engines: a router with two engines of each role, and a key for its client."""
    folder = tmp_path_factory.mktemp("router")
    keys = folder / "keys"
    keys.write_text(f"me:{CLIENT}\n")
    with (
        fleet(2, 2) as (engines, _, flags),
        router_processes(folder, 1, *flags, "--api-keys-file", str(keys)) as (process,),
    ):
        yield process.url, engines


@pytest.fixture(scope="module")
def url(router):
    return router[0]


@pytest.fixture(scope="module")
def document(url, tmp_path_factory):
    """Its document, for operators, in a file."""
    file = tmp_path_factory.mktemp("document") / "openapi.json"
    file.write_bytes(httpx.get(f"{url}/openapi.json", headers=KEY, timeout=20).content)
    return file


def run(*command, **options):
    """Run a tool; it finds the others of its environment."""
    environment = {"PATH": f"{TOOLS}:{os.environ['PATH']}", "HOME": str(options["cwd"]), "NO_COLOR": "1"}
    return subprocess.run(
        [TOOLS / command[0], *command[1:]],
        env=environment | options.pop("env", {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def test_the_document_is_one_of_openapi_3_1(document, tmp_path):
    """Strict generators refuse any other."""
    done = run("openapi-spec-validator", document, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, f"{document}: OK\n")


def test_a_client_that_was_made_of_the_document_uses_the_router(router, document, tmp_path):
    """Each answer has the type that the document says; the generator has nothing to complain of."""
    url, engines = router
    package = tmp_path / "router_client"
    made = run(
        "openapi-python-client",
        "generate",
        "--path",
        document,
        "--output-path",
        package,
        "--meta",
        "none",
        cwd=tmp_path,
    )
    called = run("python", CALLS, url, CLIENT, KEY["X-Api-Key"], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})

    assert (made.returncode, made.stdout) == (0, f"Generating {package}\n")
    assert called.returncode == 0, called.stdout
    found = json.loads(called.stdout)
    assert found["completion"] == [
        "CompletionResponse",
        expected_text({"prompt": "once upon a time", "max_tokens": 5}),
        5,
    ]
    assert found["chat"][0] == "ChatCompletionResponse"
    assert found["no model"] == [404, "model"]
    assert found["no key"] == [401, "AuthenticationError"]
    assert (found["health"], found["models"]) == ("ok", ["sim"])
    assert sorted(found["instances"]) == [
        [f"{role}-{number}", role] for role in ("decode", "prefill") for number in (0, 1)
    ]
    assert found["drained"] in ([["prefill-1", "draining"]], [["prefill-1", "drained"]])
    assert found["no address"] == [400, "Invalid port number."]
    (chat,) = (json.loads(entry.body) for name in ("d0", "d1") for entry in engines[name].log if "chat" in entry.path)
    assert chat.keys() == {"model", "messages", "max_tokens", "tools", "kv_transfer_params"}  # not what was left out


# Engines judge bodies: the router passes on what they may refuse, or take though it is not in the document.
_CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,missing_required_header,unsupported_method,allow_header_conformance,ignored_auth"
)
_CHANGES = "^/instances/(add|drain|remove|turn|undrain)$"
_CHOSEN = {
    # What a simulated engine answers there has not vLLM's shape.
    "one leg": ("--include-tag", "one leg", "--exclude-checks", "response_schema_conformance"),
    "others": ("--exclude-tag", "one leg", "--exclude-path-regex", _CHANGES),
    "changes": ("--include-path-regex", _CHANGES),  # the last: few engines are left
}


@pytest.mark.parametrize("chosen", _CHOSEN)
def test_schemathesis_finds_nothing_that_the_document_does_not_say(url, document, tmp_path, chosen):
    """No status, content type, header, field or method, and no 500, but those that are described."""
    done = run(
        "schemathesis",
        "run",
        document,
        *("--url", url, "--checks", _CHECKS, *_CHOSEN[chosen]),
        *("--header", f"Authorization: Bearer {CLIENT}", "--header", f"X-Api-Key: {KEY['X-Api-Key']}"),
        *("--continue-on-failure", "--no-shrink", "--seed", SEED, "--max-time", str(SECONDS)),
        cwd=tmp_path,
    )

    assert done.returncode == 0, done.stdout
