"""Push: what a prefill engine answers, and what a decode engine makes of what the router has learned from it.

The code of vLLM's own connector runs here, on the few attributes it uses of an engine.
"""

import json
import warnings
from types import SimpleNamespace

import pytest

from pdrelay_connector.core.lease.kv_params import parse_push_params, parse_transfer_id
from pdrelay_proxy.core.model import Api, InstanceId, RequestId, TransferId
from pdrelay_proxy.core.protocol.prefill_answer import handover
from pdrelay_proxy.core.protocol.push import TRANSFER_POLICIES, decode_params, known_as
from pdrelay_proxy.core.protocol.request_bodies import prefill_fields
from pdrelay_proxy.core.raw_json import encode
from pdrelay_proxy.settings import KvTransferMode

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
P = InstanceId("prefill-0")
XID = RequestId("pdrelay-0123456789abcdef0123456789abcdef-r1")
TRANSFER = TransferId("xfer-fedcba9876543210fedcba9876543210")
P_SUFFIX, D_SUFFIX = "-0123abcd", "-89abcdef"  # vLLM adds another one to the id on each engine


@pytest.fixture(scope="module")
def vllm():
    """What is needed of vLLM; importing it warns about things that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id
        from vllm.v1.request import RequestStatus
    finished = RequestStatus.FINISHED_LENGTH_CAPPED
    return SimpleNamespace(push=NixlPushConnectorScheduler, base_id=get_base_request_id, finished=finished)


def engine(**attributes):
    """As much of a scheduler as the methods below look at."""
    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, decode_context_parallel_size=1)
    common = {
        "engine_id": "p-engine",
        "side_channel_host": "10.0.0.1",
        "side_channel_port": 5600,
        "vllm_config": SimpleNamespace(parallel_config=parallel),
        "transfer_tp_size": 2,
        "use_host_buffer": False,
        "get_exchange_clipped_blocks": lambda blocks: blocks,
        "_stop_heartbeat": lambda request: None,
        "_TRANSFER_MODE": "push",
        "_kv_lease_duration": 30,
        "_push_registration_timeout": 480,
    }
    books = "_push_registration_deadlines _reqs_need_send _finished_request_blocks _newly_finished_push_blocks"
    books += " _push_pending_registrations _reqs_need_recv"
    return SimpleNamespace(**common | {name: {} for name in books.split()} | attributes)


def answer_of(vllm, request_id, transfer):
    """The answer of an in-tree prefill engine that has finished a prompt."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    request = SimpleNamespace(
        request_id=request_id,
        status=vllm.finished,
        kv_transfer_params=params,
        num_computed_tokens=9,
    )
    _, said = vllm.push.request_finished(engine(), request, ([1, 2],))
    return json.dumps({"kv_transfer_params": said}).encode()


def told_at_once(found, api):
    return json.loads(bytes(decode_params(found.coordinates, api, XID, TRANSFER)))


@pytest.mark.parametrize("api", Api)
def test_an_in_tree_decode_engine_finds_all_it_needs_before_and_after_the_answer(vllm, api):
    """It looks things up by name, and dies of the first that is missing."""
    answer = answer_of(vllm, known_as(api, XID) + P_SUFFIX, TRANSFER)
    found = handover(P, answer, api, XID, TRANSFER_POLICIES[KvTransferMode.AUTO], transfer=TRANSFER)
    for told in (told_at_once(found, api), json.loads(bytes(found.params))):
        decode = engine(engine_id="d-engine", side_channel_port=5700)
        request = SimpleNamespace(request_id=known_as(api, XID) + D_SUFFIX, kv_transfer_params=told)
        blocks = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ([7, 8],))
        vllm.push.update_state_after_alloc(decode, request, blocks, 9)

        (registration,) = decode._push_pending_registrations.values()
        assert registration["remote_engine_id"] == "p-engine"
        assert (registration["remote_host"], registration["remote_port"]) == ("10.0.0.1", 5600)
        assert (registration["remote_tp_size"], registration["remote_pp_size"]) == (2, 1)
        assert decode._reqs_need_recv


@pytest.mark.parametrize("api", Api)
def test_in_tree_engines_agree_on_the_name_of_a_request(vllm, api):
    """They cut off what each has added, and our ids must not look like that."""
    shared = known_as(api, XID)
    assert {vllm.base_id(shared + suffix) for suffix in (P_SUFFIX, D_SUFFIX, "")} == {shared}


@pytest.mark.parametrize("api", Api)
def test_our_connectors_agree_on_the_name_of_a_transfer(vllm, api):
    """The router has named it on both legs, whether decode is told before or after prefill has answered."""
    leg = json.loads(encode(prefill_fields(api, {}, TRANSFER)))["kv_transfer_params"]
    name = parse_transfer_id(leg, known_as(api, XID) + P_SUFFIX)
    found = handover(
        P,
        answer_of(vllm, known_as(api, XID) + P_SUFFIX, TRANSFER),
        api,
        XID,
        TRANSFER_POLICIES[KvTransferMode.AUTO],
        transfer=TRANSFER,
    )
    for told in (told_at_once(found, api), json.loads(bytes(found.params))):
        assert parse_push_params(told, known_as(api, XID) + D_SUFFIX).remote_request_id == name == TRANSFER


def test_a_leg_of_an_engine_that_pulls_is_as_it_was():
    """The name of the transfer is one more unknown key to it, and comes back from nobody."""
    params = {"remote_request_id": "r", "remote_engine_id": "e", "remote_host": "h", "remote_port": 1}
    params |= {"do_remote_prefill": True, "remote_block_ids": [[1]], "transfer_mode": "pull"}
    answer = json.dumps({"kv_transfer_params": params}).encode()

    found = handover(P, answer, Api.CHAT, XID, TRANSFER_POLICIES[KvTransferMode.AUTO], transfer=TRANSFER)
    assert json.loads(encode({"p": found.params})) == {"p": params}
