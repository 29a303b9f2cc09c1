"""What a prefill engine's answer is good for, and what a decode engine is told before there is one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.model import Api, InstanceId, RequestId, TransferId
from pdrelay_proxy.core.protocol.prefill_answer import handover, kv_params
from pdrelay_proxy.core.protocol.push import TRANSFER_POLICIES, decode_params, known_as
from pdrelay_proxy.core.raw_json import maybe
from pdrelay_proxy.core.schemas import Coordinates, PlainPrefillAnswer, PromptIdsAnswer, TokensAnswer
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.settings import KvTransferMode

P = InstanceId("prefill-0")
R = RequestId("pdrelay-1")
TRANSFER = TransferId("xfer-9")
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "cmpl-pdrelay-1-0-0123abcd",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 2,
    "transfer_mode": "push",
    "of_tomorrow": 0.10,
}
ABSENT = object()


def answer(**changes):
    params = {name: value for name, value in (PARAMS | changes).items() if value is not ABSENT}
    return json.dumps({"kv_transfer_params": params}).encode()


def read(mode=KvTransferMode.AUTO, **changes):
    return handover(P, answer(**changes), Api.COMPLETIONS, R, TRANSFER_POLICIES[mode], transfer=TRANSFER)


def test_a_push_answer_tells_where_its_engine_is():
    """What it leaves out has vLLM's default."""
    assert read().coordinates == Coordinates("e", "10.0.0.1", 5600, tp_size=2, pp_size=1, dcp_size=1)


def test_a_decode_leg_that_follows_it_gets_the_whole_answer_and_the_name_of_the_transfer():
    """Fields of tomorrow included."""
    assert json.loads(bytes(read().params)) == PARAMS | {"transfer_id": "xfer-9"}


@pytest.mark.parametrize("said", ["pull", ABSENT, "of tomorrow"])
def test_any_other_answer_goes_on_unread(said):
    """Byte for byte: only push needs something of ours in it."""
    found = read(transfer_mode=said)

    assert found.coordinates is None
    assert bytes(found.params) in answer(transfer_mode=said)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"remote_port": "5600"}, "remote_port"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 70000}, "remote_port"),
        ({"remote_port": True}, "remote_port"),
        ({"remote_host": 7}, "remote_host"),
        ({"remote_engine_id": ["e"]}, "remote_engine_id"),
        ({"tp_size": ABSENT}, "tp_size"),
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": None}, "tp_size"),
        ({"tp_size": 0.0}, "tp_size"),
        ({"tp_size": 1e40}, "tp_size"),
        ({"pp_size": 1.5}, "pp_size"),
        ({"dcp_size": "1"}, "dcp_size"),
        ({"transfer_mode": 3}, "transfer_mode"),
        ({"remote_request_id": 9}, "remote_request_id"),
        ({"remote_request_id": "cmpl-other-0-0123abcd"}, "by another id"),
        ({"remote_request_id": "cmpl-pdrelay-11-0-0123abcd"}, "by another id"),
        ({"do_remote_prefill": False}, "do_remote_prefill"),
        ({"remote_block_ids": ABSENT}, "remote_block_ids"),
    ],
)
def test_what_a_decode_engine_would_die_of_is_an_error_here(changes, says):
    """Or would wait for until its own time limit of minutes."""
    with pytest.raises(EngineError, match=f"prefill-0 .*{says}"):
        read(**changes)


@given(st.integers(1, 65535), st.integers(1, 2**16), st.sets(st.sampled_from(["remote_port", "tp_size", "pp_size"])))
def test_whole_floats_are_taken_for_the_integers_that_they_were(port, size, names):
    """A gateway in a language without integers writes them; the next request's decode engine is told integers."""
    numbers = {"remote_port": port, "tp_size": size, "pp_size": size}
    written = {name: float(value) if name in names else value for name, value in numbers.items()}

    assert read(**written).coordinates == read(**numbers).coordinates
    assert isinstance(read(**written).coordinates.remote_port, int)


def test_what_is_learned_is_enough_for_the_next_request():
    """All of it by type; both legs derive the same names from the same id."""
    told = json.loads(bytes(decode_params(read().coordinates, Api.CHAT, RequestId("pdrelay-2"), TRANSFER)))

    assert told == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "pp_size": 1,
        "dcp_size": 1,
        "remote_request_id": known_as(Api.CHAT, RequestId("pdrelay-2")),
        "transfer_id": "xfer-9",
        "transfer_mode": "push",
    }


def test_the_mode_decides_about_an_engine_that_does_not_say_and_refuses_one_that_contradicts():
    """A decode engine that is told to wait for a push by an engine that lends its blocks would wait in vain."""
    assert read(KvTransferMode.PUSH, transfer_mode=ABSENT).coordinates
    assert read(KvTransferMode.PULL).coordinates
    assert not TRANSFER_POLICIES[KvTransferMode.PULL].at_once
    with pytest.raises(EngineError, match=r"does not push .* --kv-transfer-mode push"):
        read(KvTransferMode.PUSH, transfer_mode="pull")


@pytest.mark.parametrize("said", ["0.0.0.0", "::", "[::]"])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_host_where_nobody_can_reach_an_engine_is_replaced_by_its_own(said, mode):
    """It listens on every interface: each decode engine would ask itself, and compute the prompt."""
    body = answer(remote_host=said, transfer_mode=mode)
    found = handover(
        P, body, Api.COMPLETIONS, R, TRANSFER_POLICIES[KvTransferMode.AUTO], transfer=TRANSFER, host="p0.example"
    )

    params = json.loads(bytes(found.params))
    assert (params["remote_host"], found.replaced) == ("p0.example", said)
    assert params["of_tomorrow"] == 0.10
    assert found.coordinates is None or found.coordinates.remote_host == "p0.example"


@pytest.mark.parametrize(
    ("said", "known"),
    [("10.0.0.1", "p0.example"), ("127.0.0.1", "10.0.0.1"), ("localhost", "p0.example"), ("::1", "localhost")],
)
def test_a_host_that_can_be_right_stays(said, known):
    """All on one machine is how everybody begins."""
    body = answer(remote_host=said)
    found = handover(P, body, Api.COMPLETIONS, R, TRANSFER_POLICIES[KvTransferMode.AUTO], transfer=TRANSFER, host=known)

    assert (json.loads(bytes(found.params))["remote_host"], found.replaced) == (said, None)


@pytest.mark.parametrize(
    "name", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids"]
)
@pytest.mark.parametrize("value", [ABSENT, None])
def test_parameters_that_would_kill_a_decode_engine_stop_here(name, value):
    """Seen on real engines: an assertion, or a KeyError, and every request of that engine is gone."""
    with pytest.raises(EngineError, match=f"prefill-0 left out of its kv_transfer_params: {name}"):
        kv_params(P, answer(**{name: value}))


def test_an_empty_list_of_blocks_kills_as_none_does():
    """vLLM tests it for truth before an assertion."""
    for text in (b"[]", b"[ ]"):
        with pytest.raises(EngineError, match="prefill-0 left out of its kv_transfer_params: remote_block_ids"):
            kv_params(P, answer(remote_block_ids=7).replace(b"7", text))


@pytest.mark.parametrize("value", [False, None, 1, "true", ABSENT])
def test_nothing_is_decoded_that_was_not_prefilled(value):
    """The decode engine would compute the prompt again and nobody would notice."""
    with pytest.raises(EngineError, match="do_remote_prefill is not true"):
        kv_params(P, answer(do_remote_prefill=value))


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":[1]}', b"[" * 99_999]
)
def test_an_answer_without_parameters_is_the_engines_fault(body):
    """A prefill engine without a connector answers like this."""
    with pytest.raises(EngineError, match=r"prefill-0 answered without (usable )?kv_transfer_params"):
        kv_params(P, body)


@pytest.mark.parametrize("number", [-1, 10**400])
@pytest.mark.parametrize("parsed_as", [PlainPrefillAnswer, PromptIdsAnswer, TokensAnswer])
def test_an_absurd_number_of_tokens_counts_as_none(parsed_as, number):
    """It would become the price of every later prompt of the model. The KV is as good as ever."""
    body = answer()[:-1] + b', "usage": {"prompt_tokens": %d}}' % number
    params, _, counted = kv_params(P, body, maybe(body, parsed_as))

    assert (json.loads(bytes(params)), counted) == (PARAMS, None)
