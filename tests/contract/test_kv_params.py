"""What P's connector writes is what D's connector reads, after the router has carried it."""

import json

from hypothesis import given
from hypothesis import strategies as st

from xpyd_connector.core.lease.kv_params import PullParams, parse_pull_params
from xpyd_connector.core.lease.signatures import Signatures
from xpyd_connector.core.messages import MAX_BLOCKS, MAX_ID, MAX_PROMPT
from xpyd_proxy.core.model import InstanceId
from xpyd_proxy.core.protocol.request_bodies import decode_body, kv_params, parse

SIGNATURES = Signatures(lambda: (b"secret",))
BLOCKS = st.integers(0, MAX_BLOCKS - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=MAX_ID)
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
    xpyd_prompt=st.none() | st.text("0123456789abcdef", max_size=32),
    xpyd_expires_at=st.integers(0, 2**33),
).map(SIGNATURES.sign)


@given(OFFERS, st.booleans())
def test_an_offer_survives_the_router(offer, ascii_only):
    """Whatever JSON printer P's server uses."""
    written = json.dumps(offer.to_params(), ensure_ascii=ascii_only)
    answer = f'{{"id":"x","kv_transfer_params":{written},"usage":{{}}}}'.encode()
    client = parse(b'{"model":"m","prompt":"hi"}', strip_private=False)
    params, *_ = kv_params(InstanceId("p"), answer)
    body = decode_body(client, params)

    assert written.encode() in body
    arrived = parse_pull_params(json.loads(body)["kv_transfer_params"])
    assert arrived == offer
    assert SIGNATURES.check(arrived, now=0.0)
