"""What travels through the router: everything vLLM's own connector says, and nothing that can hurt us."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdrelay_connector.core.ids import Address, BlockId, EngineId, RequestId
from pdrelay_connector.core.lease.kv_params import (
    REFUSALS,
    PullParams,
    common_id,
    digest_prompt,
    parse_pull_params,
    parse_push_params,
    parse_transfer_id,
)
from pdrelay_connector.core.lease.signatures import Signatures
from pdrelay_connector.core.messages import MAX_BLOCKS, MAX_ID
from pdrelay_connector.errors import InvalidKvParams

OFFER = PullParams(
    EngineId("p0"), RequestId("cmpl-1"), "10.0.0.1", 5600, ((BlockId(4), BlockId(2)),), 30, pdrelay_prompt="d1"
)


def params(**changes):
    return {**OFFER.to_params(), **changes}


def keys_of_vllm():
    """The keys of the dict that vLLM's pull scheduler returns, from its source (importing it takes seconds)."""
    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    source = vllm / "distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py"
    calls = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]
    (found,) = [
        {keyword.arg for keyword in call.keywords}
        for call in calls
        if getattr(call.func, "id", "") == "dict"
        and any(keyword.arg == "remote_block_ids" for keyword in call.keywords)
    ]
    return found


def test_an_offer_says_everything_that_vllms_own_connector_says():
    """Stock routers look into it, and check for some of these keys."""
    assert keys_of_vllm() <= OFFER.to_params().keys()


def test_an_offer_asks_the_decode_engine_to_load():
    """The router passes the object on as it is: it must already be the decode engine's order."""
    assert OFFER.to_params()["do_remote_prefill"] is True
    assert OFFER.to_params()["do_remote_decode"] is False


def test_an_offer_survives_json():
    """The router and two HTTP servers print and parse it."""
    assert parse_pull_params(json.loads(json.dumps(OFFER.to_params()))) == OFFER


def test_unknown_keys_are_ignored():
    """A newer prefill engine says more."""
    assert parse_pull_params(params(pdrelay_tomorrow=1)) == OFFER


def test_the_address_is_where_the_blocks_are():
    """What the worker and the heartbeat connect to."""
    assert OFFER.address == Address("10.0.0.1", 5600)
    assert str(OFFER.address) == "10.0.0.1:5600"
    assert str(Address("fd00::1", 5600)) == "[fd00::1]:5600"


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
def test_a_missing_key_is_named(key):
    """So that an operator can tell which router lost it."""
    incomplete = params()
    del incomplete[key]

    with pytest.raises(InvalidKvParams, match=key):
        parse_pull_params(incomplete)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(OFFER.to_params())), JSON))
def test_arbitrary_params_are_an_offer_or_a_bad_offer(changes):
    """Never another exception: it would stop the engine for everybody."""
    try:
        offer = parse_pull_params(params(**changes))
        Signatures(lambda: (b"secret",)).check(offer, now=0.0)
    except InvalidKvParams:
        return
    assert 0 < offer.remote_port < 65536


def in_floats(value):
    """What a language without integers makes of a JSON value."""
    if isinstance(value, list | tuple):
        return [in_floats(item) for item in value]
    return float(value) if type(value) is int else value


@given(st.sets(st.sampled_from(sorted(OFFER.to_params()))), st.integers(0, 2**40), st.integers(0, MAX_BLOCKS - 1))
def test_whole_floats_are_taken_for_the_integers_that_they_were(names, expires, block):
    """Routers in languages without integers write them: each transfer behind such a router would be lost."""
    offer = replace(
        OFFER,
        remote_block_ids=((BlockId(block), BlockId(2)), ()),
        pdrelay_block_sizes=(16,),
        pdrelay_expires_at=expires,
    )
    signed = Signatures(lambda: (b"secret",)).sign(offer)
    carried = {name: in_floats(value) if name in names else value for name, value in signed.to_params().items()}

    assert parse_pull_params(json.loads(json.dumps(carried))) == signed


@given(st.lists(st.integers(0, 2**31), max_size=5), st.lists(st.text(max_size=3), max_size=2), st.none() | st.text())
def test_a_digest_tells_prompts_apart(tokens, features, salt):
    """Token ids, pictures and the cache salt all decide the KV."""
    digest = digest_prompt(tokens, features, salt)

    assert digest == digest_prompt(list(tokens), iter(features), salt)
    assert digest != digest_prompt([*tokens, 1], features, salt)
    assert digest != digest_prompt(tokens, [*features, "x"], salt)
    assert digest != digest_prompt(tokens, features, f"{salt}x")


def test_a_prompt_without_token_ids_has_no_digest():
    """Prompt embeddings: nothing to compare."""
    assert digest_prompt(None, [], None) is None


def test_every_refusal_has_a_counter():
    """One without would stop the engine at the first such offer."""
    assert REFUSALS.keys() == {InvalidKvParams, *InvalidKvParams.__subclasses__()}
    assert len(set(REFUSALS.values())) == len(REFUSALS)


# ---- push

BOOKING = {"remote_engine_id": "p0", "remote_host": "10.0.0.1", "remote_port": 5600, "transfer_id": "t"}


def test_push_params_name_the_engine_and_the_transfer():
    """Unknown keys are ignored, and what a pull offer would call the request is not believed."""
    booking = parse_push_params({**BOOKING, "remote_request_id": "x" * 999, "pdrelay_tomorrow": 1}, "d-1")

    assert booking.address == Address("10.0.0.1", 5600)
    assert booking.remote_request_id == "t"


def test_params_of_an_engine_that_pushes_are_push_params_too():
    """A router that waits for P hands its reply to D."""
    offer = PullParams(**{**{name: getattr(OFFER, name) for name in OFFER.__struct_fields__},
                     "transfer_mode": "push", "transfer_id": "t"})  # fmt: skip

    assert parse_push_params(json.loads(json.dumps(offer.to_params())), "d-1").remote_request_id == "t"


def test_whole_floats_are_taken_in_push_as_well():
    """A push names one integer."""
    assert parse_push_params({**BOOKING, "remote_port": 5600.0}, "d-1") == parse_push_params(BOOKING, "d-1")


BOTH = {
    "remote_engine_id": (None, 7, "\ud800", "p\nWARNING"),
    "remote_host": (None, "", "h" * 256, 1, "\ud800", "h\x1b[2J"),
    "remote_port": (None, "5600", 0, -1, 65536, 2**70, 1.5, 0.0, -1.0, 65536.0, 1e40, float("nan"), float("inf")),
}
BROKEN = {
    **BOTH,
    "remote_request_id": (None, 7, "x" * (MAX_ID + 1), "\udfff", "r\u2028WARNING"),
    "remote_block_ids": (None, [], [[]], [1], [["1"]], [[-1]], [[MAX_BLOCKS]], [[2**63]], [[2**70]], [[1.5]], "x"),
    "remote_num_tokens": (None, "30", 1.5, -1, -1.0, 2**70),
    "tp_size": (0, 2**70),
    "pdrelay_prompt": (7, "\ud800"),
    "transfer_id": (7, "\ud800", "t\r"),
    "pdrelay_expires_at": (-1, 1.5, 2**70, 1e40, float("nan"), float("-inf")),
    "pdrelay_signature": (7, "0" * 129),
    "transfer_mode": ("push", None),
}
BROKEN_BOOKINGS = {
    **BOTH,
    "transfer_id": ("", 7, "x" * (MAX_ID + 1), "\udfff", ["t"], "t\nWARNING"),
    "transfer_mode": ("pull", None, 1),
}


def parse_booking(given):
    return parse_push_params(given, "d-1")


@pytest.mark.parametrize(
    ("parse", "given", "key", "value"),
    [
        pytest.param(parse, given, key, value, id=f"{parse.__name__}-{key}-{value!a:.20}")
        for parse, given, broken in ((parse_pull_params, params(), BROKEN), (parse_booking, BOOKING, BROKEN_BOOKINGS))
        for key, values in broken.items()
        for value in values
    ],
)
def test_malformed_params_are_refused_in_one_sentence(parse, given, key, value):
    """The prompt is computed here then.

    A number out of range would end the transfer thread instead, and a name with a line break forge a line of the log.
    """
    with pytest.raises(InvalidKvParams, match=r"^kv_transfer_params: ") as caught:
        parse({**given, key: value})

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [1.5, 1e40, float("nan"), float("inf")], ids=repr)
def test_other_floats_are_called_floats(value):
    """The sentence says what was given, also beside whole floats."""
    with pytest.raises(InvalidKvParams, match=r"Expected `int`, got `float` - at `\$\.remote_port`"):
        parse_pull_params(params(remote_port=value, remote_num_tokens=30.0))


@pytest.mark.parametrize(
    ("own", "common"),
    [("cmpl-1-0-0a1b2c3d", "cmpl-1-0"), ("cmpl-1", "cmpl-1"), ("0a1b2c3d", "0a1b2c3d"), ("x-0A1B2C3D", "x-0A1B2C3D")],
)
def test_without_a_transfer_id_the_common_part_of_the_requests_id_names_it(own, common):
    """vLLM adds eight hexadecimal digits to it, other ones on each engine."""
    params = {key: value for key, value in BOOKING.items() if key != "transfer_id"}

    assert common_id(own) == common
    assert parse_push_params(params, own).remote_request_id == parse_transfer_id({}, own) == common


def test_a_request_id_that_does_not_fit_into_a_message_is_refused():
    """A client chooses a part of it."""
    params = {key: value for key, value in BOOKING.items() if key != "transfer_id"}

    with pytest.raises(InvalidKvParams, match="characters"):
        parse_push_params(params, "x" * (MAX_ID + 1))
    with pytest.raises(InvalidKvParams, match="transfer_id"):
        parse_transfer_id({}, "x" * (MAX_ID + 1))


@pytest.mark.parametrize("name", [7, ["t"], {"a": 1}, "a\nb", "\ud800", "x" * (MAX_ID + 1), True], ids=repr)
def test_a_transfer_id_that_cannot_be_used_is_refused(name):
    """It would break a message, or a log."""
    with pytest.raises(InvalidKvParams, match="transfer_id"):
        parse_transfer_id({"transfer_id": name}, "p-1")


@given(st.dictionaries(st.sampled_from([*sorted(BOOKING), "transfer_mode", "remote_request_id"]), JSON), st.text())
def test_arbitrary_params_are_push_params_or_invalid(changes, own):
    """Never another exception: it would stop the engine for everybody."""
    for read in (parse_push_params, parse_transfer_id):
        try:
            read({**BOOKING, **changes}, own)
        except InvalidKvParams:
            continue
