"""What P's connector writes is what D's connector reads, after the router has carried it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.lease.kv_params import PullParams, parse_pull_params
from pdrelay_connector.core.lease.signatures import Signatures
from pdrelay_connector.core.lease.transfer_names import abandoned_transfer, transfer_of
from pdrelay_connector.core.messages import MAX_BLOCKS, MAX_ID, MAX_PROMPT
from pdrelay_proxy.core.model import Api, InstanceId
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.protocol.prefill_answer import kv_params
from pdrelay_proxy.core.protocol.request_bodies import abandon_body, decode_body, prefill_fields
from pdrelay_proxy.core.raw_json import encode
from pdrelay_proxy.io.request_path.ids import new_transfer

SIGNATURES = Signatures(lambda: (b"secret",))
BLOCKS = st.integers(0, MAX_BLOCKS - 1)
NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=MAX_ID)  # printable: logs name them
OFFERS = st.builds(
    PullParams,
    remote_engine_id=NAMES,
    remote_request_id=NAMES,
    remote_host=st.text("abc.:-0123456789", min_size=1, max_size=40),
    remote_port=st.integers(1, 65535),
    remote_block_ids=st.tuples(st.lists(BLOCKS, min_size=1, max_size=5).map(tuple)),
    remote_num_tokens=st.integers(0, MAX_PROMPT),
    tp_size=st.integers(1, 64),
    remote_blocks_expiry_time=st.none() | st.floats(0, 1e12),
    pdrelay_prompt=st.none() | st.text("0123456789abcdef", max_size=32),
    pdrelay_expires_at=st.integers(0, 2**33),
).map(SIGNATURES.sign)


@given(OFFERS, st.booleans())
def test_an_offer_survives_the_router(offer, ascii_only):
    """Whatever JSON printer P's server uses."""
    written = json.dumps(offer.to_params(), ensure_ascii=ascii_only)
    answer = f'{{"id":"x","kv_transfer_params":{written},"usage":{{}}}}'.encode()
    client = parse(b'{"model":"m","prompt":"hi"}')
    params, *_ = kv_params(InstanceId("p"), answer)
    body = decode_body(client, params)

    assert written.encode() in body
    arrived = parse_pull_params(json.loads(body)["kv_transfer_params"])
    assert arrived == offer
    assert SIGNATURES.check(arrived, now=0.0)


@pytest.mark.parametrize("api", [Api.COMPLETIONS, Api.CHAT, Api.RESPONSES, Api.MESSAGES])
def test_what_the_router_abandons_is_what_it_has_had_computed(api):
    """The connector knows the prefill by the name that the router gives up later."""
    client = parse(b'{"model":"m","prompt":"hi"}')
    transfer = new_transfer()
    asked, given_up = (
        json.loads(body)["kv_transfer_params"]
        for body in (encode(prefill_fields(api, client, transfer)), abandon_body(client, transfer))
    )

    assert transfer_of(asked) == abandoned_transfer(given_up) == transfer
    assert not given_up["do_remote_decode"]
    assert not given_up["do_remote_prefill"]
