"""Every path that vLLM's servers have: the router splits it, passes it through, or refuses it for a reason.

The paths are taken from vLLM's sources, so that one which a new version brings fails here until somebody has decided.
"""

import ast
import warnings
from pathlib import Path

import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine

METHODS = {"get", "post", "put", "patch", "delete", "head", "options", "websocket", "api_route", "add_api_route"}
OWN = {
    "/health": "the router has its own",
    "/v1/models": "the router has its own, of all engines",
    "/docs": "the router has its own",
}
LATER = {"/v1/decisions"}  # vLLM 0.33 has it
ADMINISTRATION = "it changes the engine for all clients"
REFUSED = {
    # Requests of one client at one engine: clients cannot reach a certain engine, and could name others' requests.
    "/v1/responses/{response_id}": "the answer is in one engine's memory",
    "/v1/responses/{response_id}/cancel": "the same: background answers are refused (check_wanted_now)",
    "/inference/v1/abort_requests": "a client could end requests of others; it ends its own by closing the connection",
    "/abort_requests": "the same",
    "/v1/realtime": "a WebSocket, whose session is never split: an L7 proxy relays it as well",
    # Generating, without what keeps clients apart.
    "/cohere/v2/chat": "its request has no cache_salt, so the prompts of two keys could share the prefix cache",
    "/cohere/v2/chat/render": "belongs to the one above",
    # What an engine says of itself; some of it names addresses, files or other clients' prompts.
    "/kv_event_sources": "addresses of the engine's own sockets",
    "/load": "the router knows it by its own metrics",
    "/version": "of the engine; the router asks for it in its probes",
    "/server_info": "the engine's whole configuration and environment",
    "/tokenizer_info": "the files of the model; off by default in vLLM",
    "/ping": "SageMaker's /health",
    "/static": "files of the engine's page",
    "/ready": "of vLLM's supervisor of data-parallel ranks",
    "/readyz": "the same",
    # SageMaker's dispatcher reaches any of the others by the shape of the body.
    "/invocations": "it would reach paths that are refused here",
    # Administration.
    **dict.fromkeys(
        (
            "/collective_rpc", "/fault_tolerance/apply", "/fault_tolerance/status", "/finish_weight_update",
            "/get_world_size", "/init_weight_transfer_engine", "/is_paused", "/is_scaling_elastic_ep", "/is_sleeping",
            "/pause", "/release_kv_cache_memory", "/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache",
            "/resume", "/scale_elastic_ep", "/shutdown_weight_transfer_engine", "/sleep", "/start_draft_weight_update",
            "/start_profile", "/start_weight_update", "/stop_profile", "/update_weight_version", "/update_weights",
            "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/wake_up", "/weight_checker", "/weight_info",
        ),
        ADMINISTRATION,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def routes():
    """Return the methods of each path in vLLM's sources."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm
    found: dict[str, set[str]] = {}
    for file in Path(vllm.__file__).parent.joinpath("entrypoints").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                first = node.args[0] if node.args else None
                is_path = isinstance(first, ast.Constant) and str(first.value).startswith("/")
                if is_path and (name in METHODS or name == "mount"):
                    found.setdefault(first.value, set()).add(name)
    return found


def test_every_path_of_vllm_is_decided(routes):
    """Split, one leg, the router's own, or refused."""
    decided = {*ENDPOINTS, *OWN, *REFUSED}

    assert len(routes) > 50  # the sources were read as they are meant
    assert set(routes) - decided == set()
    assert REFUSED.keys() & ENDPOINTS.keys() == set()


def test_no_path_of_ours_is_unknown_to_vllm(routes):
    """A path that a version drops would be a promise that no engine keeps."""
    if not {"/v1/systemone", "/v1/realtime"} <= routes.keys():
        pytest.skip("this vLLM is older than the table, which is 0.32's")
    assert ENDPOINTS.keys() - routes.keys() <= LATER
    assert REFUSED.keys() - routes.keys() == set()


def test_all_that_is_passed_is_a_post(routes):
    """The router takes no other method there."""
    posts = {"post", "api_route", "add_api_route"}

    assert {path for path in ENDPOINTS if path in routes and not routes[path] & posts} == set()


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_what_is_refused_is_no_endpoint(path):
    """Not as a path below another one, either."""
    assert not any(path.startswith(f"{one}/") and path in ENDPOINTS for one in ENDPOINTS)
    assert path not in {api.value for api in Api}


def test_the_table_of_the_documentation_names_all_paths():
    """docs/reference/http.md, which clients read."""
    page = (Path(__file__).parents[2] / "docs/reference/http.md").read_text()

    assert {path for path in ENDPOINTS if f"`{path}`" not in page} == set()
