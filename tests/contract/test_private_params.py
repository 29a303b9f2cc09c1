"""Where vLLM takes KV transfer parameters from a request: no client gets any there past the router.

They name memory of another client's request, or kill the engine ("kv_transfer_params": "x" is enough). All places are
found in vLLM's sources, so that a new version with one more fails here.
"""

import ast
import json
import warnings
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from pdrelay_proxy.core.http.multipart import check_form
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS, EndpointKind
from pdrelay_proxy.errors import BadRequest

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine

NAMES = ("kv_transfer_params", "ec_transfer_params")
ATTACKS = [{"do_remote_prefill": True}, {"do_remote_decode": True, "transfer_id": "xfer-of-another"}, "x", 7, [], False]
# Fields of vLLM's requests that reach the engine's SamplingParams.extra_args, by the class that has them.
FIELDS = {
    "AnthropicMessagesRequest": {"kv_transfer_params", "ec_transfer_params", "vllm_xargs"},
    "ChatCompletionRequest": {"kv_transfer_params", "ec_transfer_params", "vllm_xargs"},
    "CohereChatV2Request": {"kv_transfer_params"},  # no endpoint of ours
    "CompletionRequest": {"kv_transfer_params", "ec_transfer_params", "vllm_xargs"},
    "GenerateRequest": {"kv_transfer_params", "ec_transfer_params", "sampling_params"},
    "ResponsesRequest": {"kv_transfer_params", "ec_transfer_params", "vllm_xargs"},
    "TranscriptionRequest": {"vllm_xargs"},  # a form, whose value is JSON
    "TranslationRequest": {"vllm_xargs"},
}
# Where the engine itself looks: vllm/v1/request.py and those that ask a request's parameters beside it.
READERS = {
    "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py",
    "distributed/kv_transfer/kv_connector/v1/lmcache_integration/vllm_v1_adapter.py",
    "v1/engine/output_processor.py",
    "v1/request.py",
}
PLACES = [(), ("vllm_xargs",), ("sampling_params", "extra_args")]
FORMS = [path for path, kind in ENDPOINTS.items() if kind is EndpointKind.FORM]


@pytest.fixture(scope="module")
def vllm():
    """The folder of vLLM's sources; importing vLLM warns about things that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm
    return Path(vllm.__file__).parent


def test_the_mode_of_kv_events_is_taken_from_extra_arguments_alone(vllm):
    """The router leaves it out there (core/protocol/client_body.py): a client could have events repeated."""
    found = {str(file.relative_to(vllm)) for file in vllm.rglob("*.py") if "kv_cache_report_mode" in file.read_text()}

    assert found == {"v1/request.py", "v1/core/kv_cache_manager.py"}
    read = ast.parse((vllm / "v1/request.py").read_text())
    calls = [ast.unparse(node) for node in ast.walk(read) if isinstance(node, ast.Call)]
    assert "sampling_params.extra_args.get('kv_cache_report_mode', 'incremental')" in calls


def test_every_field_of_a_request_that_may_carry_them_is_known(vllm):
    """A class that gains such a field has another place, which the router must look at."""
    found = {}
    for file in (vllm / "entrypoints").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.endswith(("Response", "ResponseBase")):
                wanted = {*NAMES, "vllm_xargs", "extra_args", "sampling_params"}
                fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)} & wanted
                if fields:
                    found[node.name] = fields

    assert {name: fields for name, fields in found.items() if not fields <= FIELDS.get(name, set())} == {}
    assert found.keys() >= {"ChatCompletionRequest", "GenerateRequest"}  # the sources were read as they are meant


def test_the_engine_reads_them_from_the_extra_arguments_alone(vllm):
    """Another reader of ``extra_args`` could know them by another name."""
    found = set()
    for file in vllm.rglob("*.py"):
        place = str(file.relative_to(vllm))
        text = file.read_text(errors="replace")
        if not place.startswith(("entrypoints/", "tests/")) and "extra_args" in text and "kv_transfer_params" in text:
            found.add(place)

    assert "v1/request.py" in found
    assert found - {"v1/engine/async_llm.py"} <= READERS  # that one writes them


def test_only_the_extra_arguments_hold_what_vllm_does_not_name(vllm):
    """Of the sampling parameters in a body of /inference/v1/generate."""
    from vllm import SamplingParams

    free = {name for name, hint in get_type_hints(SamplingParams).items() if str(dict[str, Any]) in str(hint)}

    assert free == {"extra_args"}


def within(place, value):
    for name in reversed(place):
        value = {name: value}
    return value


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path not in FORMS])
@pytest.mark.parametrize("place", PLACES, ids=".".join)
@pytest.mark.parametrize("name", NAMES)
def test_a_body_with_them_is_refused_at_every_endpoint(path, place, name):
    """In any spelling, and whichever of two fields with one name a reader takes."""
    for attack in ATTACKS:
        said = json.dumps(within((*place, name), attack))
        escaped = said.replace(name, f"\\u00{ord(name[0]):02x}" + name[1:])
        twice = said[:-1] + ", " + said[1:]
        for body in (said, escaped, twice):
            with pytest.raises(BadRequest, match=name):
                parse(body.encode())


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("name", [*NAMES, "vllm_xargs", "VLLM_XARGS", " vllm_xargs", "vllm_xargs[kv_transfer_params]"])
def test_a_form_with_them_is_refused(path, name):
    """vLLM parses the value of ``vllm_xargs`` as JSON (speech_to_text/transcription/protocol.py)."""
    part = f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{{"kv_transfer_params": "x"}}\r\n--b--\r\n'

    with pytest.raises(BadRequest, match="is set by the router"):
        check_form(b"b", part.encode())
    assert path in ENDPOINTS
