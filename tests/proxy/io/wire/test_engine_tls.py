"""Connections to https engines: which certificates are good enough, and what is said of the others."""

import ssl
from dataclasses import dataclass

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.io.probes.checks import HttpChecks, ProbeFailed
from pdrelay_proxy.io.wire import WireEngines
from pdrelay_proxy.io.wire.engine_tls import EngineTls
from pdrelay_proxy.settings import Settings
from support.certificates import Authority
from support.raw_engine import raw_engine, replying
from support.wiring import answer, leg_to, run

pytestmark = pytest.mark.processes


NAME = "engines.llm.svc"
OTHER_NAME = f"shows a certificate that is not for {NAME} (engine_server_name)"
OTHER_ADDRESS = "shows a certificate that is not for its address (engine_server_name names another)"
STRANGER = "shows a certificate of no authority that the router trusts (engine_ca): "
PLAIN = "speaks no TLS, though its address begins with https"


@dataclass(frozen=True)
class Case:
    """What an engine shows, what the router looks for, and what comes of it."""

    shown: str | None  # subjectAltName of its certificate; None: it speaks plain HTTP
    wanted: str | None  # engine_server_name
    reason: str | None = None  # what is counted; None: all is well
    said: str = ""
    is_known: bool = True  # the router knows the authority


CASES = {
    "the name of all engines": Case(f"DNS:{NAME}", NAME),
    "one of several names": Case(f"DNS:prefill.llm.svc,DNS:{NAME},IP:10.0.0.1", NAME),
    "a wildcard": Case("DNS:*.llm.svc", NAME),
    "its address": Case("IP:127.0.0.1", None),
    "another name": Case("DNS:stranger.llm.svc", NAME, "wrong_name", OTHER_NAME),
    "its address, but no name": Case("IP:127.0.0.1", NAME, "wrong_name", OTHER_NAME),
    "a name, and none is wanted": Case(f"DNS:{NAME}", None, "wrong_name", OTHER_ADDRESS),
    "a stranger's": Case(f"DNS:{NAME}", NAME, "untrusted", STRANGER, is_known=False),
    "plain http": Case(None, NAME, "not_tls", PLAIN),
}


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    return {name: Authority(tmp_path_factory.mktemp(name), name) for name in ("ours", "theirs")}


def serving(authority, shown, **more):
    """What an engine with such a certificate serves with."""
    if shown is None:
        return None
    pair = authority.sign("engine", shown)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    for name, value in more.items():
        setattr(context, name, value)
    return context


def trusting(authority, wanted):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.own.cert)
    return EngineTls(context, wanted)


def instance_at(at, scheme="https"):
    return Instance(InstanceId("decode-0"), Role.DECODE, Address.parse(f"{scheme}://{at}"))


def showing(case, authorities):
    """Serve as an engine of this case."""

    def refuse(_, talk):
        talk.send(answer(status=400))  # as servers of HTTP answer a handshake, without waiting for more
        talk.hung_up()

    script = refuse if case.shown is None else replying(answer())
    return raw_engine(script, tls=serving(authorities["ours" if case.is_known else "theirs"], case.shown))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_leg_reaches_only_an_engine_that_shows_the_right_name(loop, authorities, case):
    """Not a byte of the request goes to another, and the client is told no address."""
    tls = trusting(authorities["ours"], case.wanted)

    async def main(leg):
        async with WireEngines(Settings(), tls=tls) as engines:
            if case.reason is None:
                assert (await engines.post(leg, timeout_s=5)).body == b"hello"
                return
            with pytest.raises(EngineError) as caught:
                await engines.post(leg, timeout_s=5)
            assert caught.value.reached is False
            assert str(caught.value).startswith(f"decode-0 {case.said}")
            assert "127.0.0.1" not in str(caught.value)

    with showing(case, authorities) as engine:
        run(loop, main(leg_to(engine, scheme="https")))

    assert dict(tls.failures) == ({} if case.reason is None else {("decode-0", case.reason): 1})
    assert bool(engine.requests) is (case.reason is None)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_probe_takes_what_a_leg_takes(loop, authorities, case):
    """An engine that no request may go to is not healthy, and its state says why."""
    tls = trusting(authorities["ours"], case.wanted)

    async def main(instance):
        checks = HttpChecks(timeout_s=5, tls=tls)
        if case.reason is None:
            assert await checks.metrics(instance) == b"hello"
            async with checks.open(instance, "/v1/pdrelay/kv-events") as (status, read):
                assert (status, await read(5), await read(5)) == (200, b"hello", b"")
            return
        with pytest.raises(ProbeFailed) as caught:
            await checks.metrics(instance)
        assert str(caught.value).startswith(case.said)
        assert caught.value.silent is False
        assert "127.0.0.1" not in str(caught.value)
        with pytest.raises(ProbeFailed, match=r"certificate|speaks no TLS"):
            async with checks.open(instance, "/v1/pdrelay/kv-events"):
                pass

    with showing(case, authorities) as engine:
        run(loop, main(instance_at(engine.at)))

    assert dict(tls.failures) == ({} if case.reason is None else {("decode-0", case.reason): 2})


@pytest.mark.parametrize(
    ("most", "said"),
    [
        # What OpenSSL's alert says of a certificate that is missing; it says the same where no cipher is shared.
        (ssl.TLSVersion.TLSv1_2, "fails in the TLS handshake: sslv3 alert handshake failure"),
        # The alert may be lost as the engine closes the connection.
        (ssl.TLSVersion.TLSv1_3, r"certificate (of the router )?\(engine_cert\)"),
    ],
    ids=["1.2", "1.3"],
)
def test_a_probe_says_that_an_engine_wants_a_certificate(loop, authorities, most, said):
    """With TLS 1.3 the engine says so only after the handshake."""
    ours = authorities["ours"]
    tls = trusting(ours, NAME)
    context = serving(ours, f"DNS:{NAME}", verify_mode=ssl.CERT_REQUIRED, maximum_version=most)
    context.load_verify_locations(ours.own.cert)

    async def main(instance):
        checks = HttpChecks(timeout_s=5, tls=tls)
        with pytest.raises(ProbeFailed, match=said):
            await checks.metrics(instance)
        pair = ours.sign("router")
        tls.context.load_cert_chain(pair.cert, pair.key)
        assert await checks.metrics(instance) == b"hello"

    with raw_engine(replying(answer()), tls=context) as engine:
        run(loop, main(instance_at(engine.at)))


def test_http_engines_meet_no_tls(loop, authorities):
    """Where both are in one fleet the name is of no meaning to them."""
    tls = trusting(authorities["ours"], NAME)

    async def main(leg):
        async with WireEngines(Settings(), tls=tls) as engines:
            assert (await engines.post(leg, timeout_s=5)).body == b"hello"
        assert await HttpChecks(timeout_s=5, tls=tls).metrics(leg.instance) == b"hello"

    with raw_engine(replying(answer())) as engine:
        run(loop, main(leg_to(engine)))


def test_an_end_of_the_connection_is_no_failure_of_tls():
    """Engines that restart close connections in the middle of handshakes."""
    tls = EngineTls(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    at = instance_at("127.0.0.1:1")

    assert tls.failure(at, ssl.SSLEOFError("EOF occurred in violation of protocol")) is None
    assert tls.failure(at, ConnectionResetError()) is None
    assert not tls.failures
