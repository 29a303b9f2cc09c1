"""Who may say where KV lies: an offer is a prefill engine's own, of its own time, or it is not used."""

import json

import pytest

from pdrelay_connector.core.ids import BlockId, EngineId, RequestId
from pdrelay_connector.core.lease.kv_params import PullParams, parse_pull_params
from pdrelay_connector.core.lease.signatures import CLOCK_SKEW, Signatures
from pdrelay_connector.errors import ExpiredKvParams, ForgedKvParams, ReplacedHost, UnsignedKvParams
from support.engines import changed

NOW = 1_800_000_000.5  # s since the epoch
OFFER = PullParams(
    EngineId("p0"), RequestId("cmpl-1"), "10.0.0.1", 5600, ((BlockId(4), BlockId(2)), (BlockId(0), BlockId(7))), 30,
    pdrelay_prompt="d1", pdrelay_block_sizes=(16, 16), pdrelay_expires_at=int(NOW) + 30,
)  # fmt: skip


def knowing(*secrets):
    return Signatures(lambda: secrets)


P = D = knowing(b"one")
OTHER = {
    "remote_engine_id": "p1", "remote_request_id": "cmpl-2", "remote_host": "10.0.0.2", "remote_port": 5601,
    "remote_block_ids": ((4, 3), (0, 7)), "remote_num_tokens": 31, "tp_size": 2, "dcp_size": 2, "pp_size": 2,
    "transfer_mode": "push", "remote_blocks_expiry_time": 1.0, "pdrelay_prompt": None, "pdrelay_adapter": "a:0",
    "transfer_id": "t", "pdrelay_block_sizes": (16, 32), "pdrelay_expires_at": int(NOW) + 31,
    "pdrelay_signature": "0" * 64, "pdrelay_host": "10.0.0.2",
}  # fmt: skip


@pytest.mark.parametrize("adapter", [None, "b:0", ""], ids=repr)
def test_the_adapter_of_an_offer_cannot_be_changed(adapter):
    """Left out, it would be that of an engine that knows none."""
    forged = changed(P.sign(changed(OFFER, pdrelay_adapter="a:0")), pdrelay_adapter=adapter)

    with pytest.raises(ForgedKvParams):
        D.check(forged, now=NOW)


def test_a_signed_offer_survives_its_way():
    """Through two HTTP servers and a router, as JSON."""
    offer = parse_pull_params(json.loads(json.dumps(P.sign(OFFER).to_params())))

    assert D.check(offer, now=NOW)
    assert changed(offer, pdrelay_signature=None, pdrelay_host=None) == OFFER


UNSIGNED = "pdrelay_host"  # it only tells why an offer is refused


@pytest.mark.parametrize("field", [name for name in PullParams.__struct_fields__ if name != UNSIGNED])
def test_no_field_of_it_can_be_changed(field):
    """Block numbers of other people's requests were theft with HTTP 200; a new field is covered by itself."""
    forged = changed(P.sign(OFFER), **{field: OTHER[field]})

    refused = ReplacedHost if field == "remote_host" else ForgedKvParams
    with pytest.raises(refused):
        D.check(forged, now=NOW)
    with pytest.raises(ForgedKvParams, match=r"PDRELAY_CONNECTOR_SECRET of engine .* differs"):
        D.check(changed(forged, pdrelay_host=None), now=NOW)


def test_a_replaced_host_is_named_with_what_to_do():
    """Production-stack and AIBrix do this: every transfer would be lost, and the texts would be right."""
    with pytest.raises(
        ReplacedHost,
        match=r'the host p-0\.svc, and engine p0 has signed 10\.0\.0\.1: .* set "sign_host": false .* prefill engines',
    ):
        D.check(changed(P.sign(OFFER), remote_host="p-0.svc"), now=NOW)


@pytest.mark.parametrize("change", [{"remote_port": 5601}, {"pdrelay_host": "10.0.0.2"}], ids=repr)
def test_what_is_changed_besides_the_host_is_a_forgery(change):
    """And who names another host as the signed one gets nothing by it."""
    with pytest.raises(ForgedKvParams):
        D.check(changed(P.sign(OFFER), remote_host="p-0.svc", **change), now=NOW)
    assert D.check(changed(P.sign(OFFER), pdrelay_host="10.0.0.2"), now=NOW)


def test_with_sign_host_off_the_host_may_be_replaced_and_nothing_else():
    """Each D takes such an offer, whatever its own setting is: P decides what it signs."""
    offer = Signatures(lambda: (b"one",), signs_host=False).sign(OFFER)

    assert offer.pdrelay_host is None
    assert D.check(changed(offer, remote_host="p-0.svc"), now=NOW)
    with pytest.raises(ForgedKvParams):
        D.check(changed(offer, remote_host="p-0.svc", remote_port=5601), now=NOW)


def test_blocks_do_not_move_from_one_group_to_the_next():
    """The encoding has lengths in it."""
    forged = changed(P.sign(OFFER), remote_block_ids=((4,), (2, 0, 7)))

    with pytest.raises(ForgedKvParams):
        D.check(forged, now=NOW)


def test_an_offer_without_a_signature_is_refused_where_there_is_a_secret():
    """vLLM's own connector, an engine that was started without the secret, or somebody who invented it."""
    with pytest.raises(
        UnsignedKvParams, match="PDRELAY_CONNECTOR_SECRET is set here, and must be set on engine p0, too"
    ):
        D.check(OFFER, now=NOW)
    with pytest.raises(UnsignedKvParams):
        D.check(changed(P.sign(OFFER), pdrelay_expires_at=None), now=NOW)


@pytest.mark.parametrize("signature", ["", "x", "é", "\ud800", "0" * 128], ids=ascii)
def test_a_signature_may_be_any_text(signature):
    """An exception of another kind would stop the engine for everybody."""
    with pytest.raises(ForgedKvParams):
        D.check(changed(OFFER, pdrelay_signature=signature), now=NOW)


def test_another_secret_is_not_accepted():
    """With the engine named whose secret is to be looked at."""
    with pytest.raises(ForgedKvParams, match="p0"):
        D.check(knowing(b"two").sign(OFFER), now=NOW)


def test_while_secrets_change_both_are_good():
    """Engines get the new one at different times; each signs with its first."""
    old, new = knowing(b"one"), knowing(b"two", b"one")

    assert new.check(old.sign(OFFER), now=NOW)
    assert knowing(b"one", b"two").check(new.sign(OFFER), now=NOW)
    with pytest.raises(ForgedKvParams):
        old.check(new.sign(OFFER), now=NOW)


def test_secrets_are_those_of_the_moment():
    """They are read again without a restart."""
    secrets = [b"one"]
    engine = Signatures(lambda: tuple(secrets))
    first = engine.sign(OFFER)
    secrets[:] = [b"two"]

    assert engine.sign(OFFER) != first
    with pytest.raises(ForgedKvParams):
        engine.check(first, now=NOW)


def test_without_a_secret_nothing_is_proven():
    """Everything is taken, whatever it says: vLLM's own prefill engines sign nothing."""
    nobody = knowing()

    assert nobody.sign(OFFER) == OFFER
    assert not nobody.check(OFFER, now=NOW)
    assert not nobody.check(P.sign(OFFER), now=NOW + 1e9)


def test_an_offer_is_good_as_long_as_its_lease_and_what_clocks_may_differ():
    """Its lease would be over; P's fence says so, too, but this needs no question."""
    offer = P.sign(OFFER)

    assert D.check(offer, now=OFFER.pdrelay_expires_at + CLOCK_SKEW)
    assert D.check(offer, now=0.0)  # D's clock is slow
    with pytest.raises(ExpiredKvParams, match="expired 301 s ago"):
        D.check(offer, now=OFFER.pdrelay_expires_at + CLOCK_SKEW + 1)


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "::",
        "127.0.0.1",
        "127.0.1.1",
        "::1",
        "[::1]",
        "::ffff:127.0.0.1",
        "localhost",
        "Localhost.",
        "p.localhost",
    ],
)
def test_a_host_that_only_this_machine_reaches_may_be_replaced(host):
    """A router puts the one in its place by which it knows the engine; all the rest is still proven."""
    offer = P.sign(changed(OFFER, remote_host=host))

    assert D.check(offer, now=NOW)
    assert D.check(changed(offer, remote_host="10.0.0.1"), now=NOW)
    with pytest.raises(ForgedKvParams):
        D.check(changed(offer, remote_host="10.0.0.1", remote_port=5601), now=NOW)


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "prefill-0.example", "localhost.example", "notlocalhost"])
def test_any_other_host_may_not_be_replaced(host):
    """D would dial whom a stranger names."""
    offer = P.sign(changed(OFFER, remote_host=host))

    assert D.check(offer, now=NOW)
    with pytest.raises(ReplacedHost):
        D.check(changed(offer, remote_host="10.6.6.6"), now=NOW)
