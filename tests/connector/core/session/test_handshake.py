"""Who may talk to an engine, and whom an engine talks to."""

import pytest

from pdrelay_connector.core.ids import Address, EngineId, RequestId
from pdrelay_connector.core.messages import PROTOCOL, Challenge, DropLeases, Refusal, ServerProof, Welcome, decode
from pdrelay_connector.core.session.handshake import (
    NONCE_BYTES,
    Accepted,
    ClientConnection,
    HandshakeClient,
    HandshakeServer,
    ProcessRole,
    ServerConnection,
    are_of_one_engine,
    badge_of,
    hash_of,
)
from pdrelay_connector.errors import AnotherEngine, IncompatiblePeer, ProtocolViolation
from support.engines import FINGERPRINT, changed, rank_info

P, D = EngineId("p0"), EngineId("d0")
WELCOME = Welcome(PROTOCOL, P, FINGERPRINT, (rank_info("p0"),))
NONCE, OTHER_NONCE = b"n" * NONCE_BYTES, b"m" * NONCE_BYTES
AT = Address("10.0.0.1", 5600)
CALL = ClientConnection(P, AT, "10.0.0.1", b"certificate", b"g" * NONCE_BYTES)
ARRIVAL = ServerConnection(AT, b"certificate", NONCE)
CHALLENGE = Challenge(PROTOCOL, NONCE)
# As engines of protocol 9 send them.
CHALLENGE_OF_PROTOCOL_9 = bytes.fromhex(
    "83a474797065a96368616c6c656e6765a870726f746f636f6c09a56e6f6e6365c420" + 32 * "6e"
)
HELLO_OF_PROTOCOL_9 = bytes.fromhex(
    "8ca474797065a568656c6c6fa870726f746f636f6c09a6656e67696e65a26430a4726f6c65a97363686564756c6572a765787065637473"
    "a27030a4686f7374a831302e302e302e31a4706f7274cd15e0a772656163686564a831302e302e302e31a56e6f6e6365c420"
    + 32
    * "6e"
    + "a670726f6f667391c420a347bdb791c6eb31b01a8efe89e9584f5ec64f516578d0c9a4ae21707d9b0232a56261646765c400"
    "a7776f726b65727390"
)
OLD = b"the old secret"
NEW = b"the new secret"
OTHER = b"another one"


def in_force(*secrets):
    return lambda: secrets


def guest(*secrets, engine=D, **who):
    return HandshakeClient(engine, in_force(*secrets), **who)


def host(*secrets, advertised=AT.host):
    return HandshakeServer(WELCOME, in_force(*secrets), advertised)


def reason_of(answer):
    assert isinstance(answer, Refusal)
    return answer.reason


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((), ()),
        ((OLD,), (OLD,)),
        ((OLD,), (NEW, OLD)),
        ((NEW, OLD), (OLD,)),
        ((NEW, OLD), (NEW,)),
        ((NEW, OLD), (OLD, NEW)),
    ],
)
def test_engines_that_share_a_secret_accept_each_other(theirs, ours):
    """Also while a new secret is given to one engine after the other: nobody restarts, and nobody is cut off."""
    hello = guest(*ours).hello(CHALLENGE, CALL)
    answer = host(*theirs).answer(hello, ARRIVAL)

    assert isinstance(answer, Accepted)
    assert (answer.hello, answer.welcome) == (hello, WELCOME)
    guest(*ours).check(answer.proof, CHALLENGE, hello, CALL.certificate)


@pytest.mark.parametrize(("theirs", "ours"), [((OLD,), ()), ((), (OLD,)), ((OLD,), (OTHER,)), ((OLD, NEW), (OTHER,))])
def test_a_missing_or_other_secret_is_refused(theirs, ours):
    """And the sentence names the variable, on whichever side it is missing."""
    answer = host(*theirs).answer(guest(*ours).hello(CHALLENGE, CALL), ARRIVAL)

    assert "PDRELAY_CONNECTOR_SECRET" in reason_of(answer)


@pytest.mark.parametrize(
    "arrival",
    [
        ARRIVAL._replace(nonce=OTHER_NONCE),
        ARRIVAL._replace(certificate=b"that of a host in between"),
    ],
    ids=["recorded", "passed on"],
)
def test_a_proof_is_for_one_connection_to_one_host(arrival):
    """A recorded Hello, and one that a host in between passes on, are worth nothing."""
    assert "secret" in reason_of(host(OLD).answer(guest(OLD).hello(CHALLENGE, CALL), arrival))


@pytest.mark.parametrize(
    "said",
    [
        {"engine": EngineId("d1")},
        {"expects": EngineId("p1")},
        {"host": "10.0.0.9"},
        {"port": 5601},
        {"reached": "10.0.0.9"},
        {"nonce": OTHER_NONCE},
        {"role": "worker"},
        {"badge": b"x"},
        {"workers": (b"x",)},
    ],
    ids=lambda said: next(iter(said)),
)
def test_a_proof_covers_the_whole_hello(said):
    """Whoever changes a word on the way is refused."""
    hello = changed(guest(OLD).hello(CHALLENGE, CALL), **said)

    assert "secret" in reason_of(host(OLD).answer(hello, ARRIVAL))


@pytest.mark.parametrize(
    "call",
    [
        CALL._replace(dialled=Address("10.0.0.9", 5600), reached="10.0.0.9"),
        CALL._replace(dialled=Address("10.0.0.1", 5601)),
    ],
    ids=["address", "port"],
)
def test_a_client_that_dialled_another_address_is_refused(call):
    """Somebody who passes bytes on as they are sees the same certificate, but has another address."""
    answer = host(OLD).answer(guest(OLD).hello(CHALLENGE, call), ARRIVAL)

    assert "does not listen there" in reason_of(answer)


@pytest.mark.parametrize(
    ("dialled", "reached", "ours"),
    [
        ("10.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("engine.example", "10.0.0.1", "10.0.0.1"),  # a name that leads to us
        ("10.0.0.1", "10.0.0.1", "::ffff:10.0.0.1"),  # IPv4 at a socket of IPv6
        ("fe80::1%eth0", "fe80::1%eth0", "fe80::1"),
    ],
)
def test_a_name_or_another_spelling_of_our_address_is_ours(dialled, reached, ours):
    """Addresses are written in several ways."""
    call = CALL._replace(dialled=Address(dialled, 5600), reached=reached)
    answer = host(OLD, advertised="p").answer(
        guest(OLD).hello(CHALLENGE, call), ARRIVAL._replace(reached=Address(ours, 5600))
    )

    assert isinstance(answer, Accepted)


def test_the_advertised_name_may_be_translated_on_the_way():
    """The guest sees another address than ours; the name that we advertise says that it is us."""
    call = CALL._replace(dialled=Address("p.example", 5600), reached="192.0.2.1")
    answer = host(OLD, advertised="p.example").answer(guest(OLD).hello(CHALLENGE, call), ARRIVAL)

    assert isinstance(answer, Accepted)


def test_another_engine_than_the_expected_one_says_so():
    """The one that was there has restarted; who asks learns no more than it knew."""
    answer = host(OLD).answer(guest(OLD).hello(CHALLENGE, CALL._replace(expects=EngineId("p9"))), ARRIVAL)

    assert reason_of(answer) == "engine p9 does not answer here (any more), another one does"


def test_an_engine_cannot_forge_a_line_of_our_log_by_its_id():
    """The log names it where it objects to us."""
    forger = EngineId("d0\nWARNING all is well")
    answer = host(OLD).answer(guest(OLD, engine=forger).hello(CHALLENGE, CALL), ARRIVAL)

    assert reason_of(answer) == "your engine id is not printable text; set another engine_id"


@pytest.mark.parametrize("proof", [b"", b"x" * 32])
def test_a_host_that_does_not_know_the_secret_is_refused(proof):
    """Before its Welcome, and NIXL's metadata in it, is read."""
    hello = guest(OLD).hello(CHALLENGE, CALL)

    with pytest.raises(IncompatiblePeer, match="PDRELAY_CONNECTOR_SECRET"):
        guest(OLD).check(ServerProof(proof), CHALLENGE, hello, CALL.certificate)


def test_a_clients_proof_is_not_a_servers():
    """A host without the secret cannot send the guest's own proof back."""
    hello = guest(OLD).hello(CHALLENGE, CALL)

    with pytest.raises(IncompatiblePeer):
        guest(OLD).check(ServerProof(hello.proofs[0]), CHALLENGE, hello, CALL.certificate)


def test_the_proof_does_not_give_the_secret_away():
    """Who dials a stranger shows it a proof."""
    assert OLD not in guest(OLD).hello(CHALLENGE, CALL).proofs[0]


def test_another_protocol_is_refused_naming_both():
    """A rolling update must tell which side is old."""
    hello = changed(guest().hello(CHALLENGE, CALL), protocol=PROTOCOL + 1)

    assert host().answer(hello, ARRIVAL) == Refusal(
        f"this engine speaks protocol {PROTOCOL}, you speak {PROTOCOL + 1}", cause="version"
    )
    with pytest.raises(IncompatiblePeer, match=f"it speaks protocol {PROTOCOL + 1}, we speak {PROTOCOL}"):
        guest().hello(Challenge(PROTOCOL + 1, NONCE), CALL)


def test_the_protocol_before_is_told_apart_by_its_bytes():
    """With the right secret, and in both directions: its proof covers other words than ours."""
    challenge = decode(CHALLENGE_OF_PROTOCOL_9)
    hello = decode(HELLO_OF_PROTOCOL_9)

    assert isinstance(answer := host(b"one").answer(hello, ARRIVAL), Refusal)
    assert (answer.cause, answer.is_another) == ("version", False)
    assert answer.reason.endswith("you speak 9")
    with pytest.raises(AnotherEngine, match="it speaks protocol 9") as caught:
        guest(b"one").hello(challenge, CALL)
    assert caught.value.cause == "version"


def test_a_first_message_other_than_hello_is_refused():
    """Nothing about blocks is heard before a hello."""
    assert host().answer(DropLeases((RequestId("a"),)), ARRIVAL) == Refusal("the first message must be a hello")


def test_a_client_expects_a_challenge():
    """Something else listens on that port."""
    with pytest.raises(ProtocolViolation, match="expected a challenge, got Drop"):
        guest().hello(DropLeases(()), CALL)


def test_only_workers_that_a_scheduler_names_belong_to_its_engine():
    """A lease belongs to an engine: its scheduler renews it, and its workers say that they have read."""
    badges = [badge_of(token) for token in (b"token 0", b"token 1")]
    scheduler = guest(OLD, workers=tuple(map(hash_of, badges))).hello(CHALLENGE, CALL)
    workers = [guest(OLD, role=ProcessRole.WORKER, badge=badge).hello(CHALLENGE, CALL) for badge in badges]
    thief = guest(OLD, role=ProcessRole.WORKER, badge=b"a guess").hello(CHALLENGE, CALL)
    other = guest(OLD, engine=EngineId("d1"), role=ProcessRole.WORKER, badge=badges[0]).hello(CHALLENGE, CALL)

    assert all(are_of_one_engine(scheduler, worker) and are_of_one_engine(worker, scheduler) for worker in workers)
    assert not are_of_one_engine(scheduler, thief)
    assert not are_of_one_engine(scheduler, other)


def test_a_badge_gives_no_token_away():
    """The token lets a worker into its own scheduler; other engines see the badge."""
    assert b"token" not in badge_of(b"token")
    assert badge_of(b"token") != hash_of(badge_of(b"token"))
