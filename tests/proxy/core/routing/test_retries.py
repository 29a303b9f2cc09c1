"""Which failures are worth another try."""

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.core.protocol.fault_table import VERDICTS, Failure, RetryScope, RetryTarget
from pdrelay_proxy.core.routing.retries import LegFailed, RetryAttempts
from pdrelay_proxy.errors import (
    AnswerRefused,
    ConnectionStale,
    EngineError,
    EngineFault,
    EngineTimeout,
    KeyRefused,
    Moved,
    NetworkFault,
    NoKvParams,
    NoSuchPath,
    Refused,
    RouterLacks,
)

ERRORS = {
    Failure.UNREACHABLE: EngineError("x", reached=False),
    Failure.BAD_RESPONSE: EngineError("x"),
    Failure.HTTP_5XX: EngineFault("x"),
    Failure.TIMEOUT: EngineTimeout("x"),
    Failure.ENGINE_RESTARTED: Moved("x"),
    Failure.BUSY: Refused(503, "t", b""),
    Failure.NO_KV_PARAMS: NoKvParams("x"),
    Failure.REFUSED: Refused(400, "t", b""),
    Failure.UNKNOWN_MODEL: Refused(404, "t", b'{"error":{"message":"The model `m` does not exist."}}'),
    Failure.NO_SUCH_PATH: NoSuchPath(404, "t", b""),
    Failure.WRONG_KEY: KeyRefused("x"),
    Failure.ANSWER_REFUSED: AnswerRefused("x"),
    Failure.CONNECTION_CLOSED: ConnectionStale("x"),
    Failure.ROUTER_LACKS: RouterLacks("x"),
    Failure.NETWORK: NetworkFault("x"),
}


def engine(role, number):
    return Instance(InstanceId(f"{role}-{number}"), role, Address("http", "h", number + 1))


def engines(role, count):
    return [engine(role, number) for number in range(count)]


RULES = {
    (role, failure): rule
    for failure, verdict in VERDICTS.items()
    for role, rule in ((Role.PREFILL, verdict.prefill), (Role.DECODE, verdict.decode))
    if rule is not None
}


@pytest.mark.parametrize(("role", "failure"), RULES)
def test_the_whole_table(role, failure):
    """Whether there is another try with one engine and with two, and who takes it."""
    for known in (engines(role, 1), engines(role, 2)):
        failed = LegFailed(known[0], ERRORS[failure])
        chances = RetryAttempts(1)
        rule = RULES[role, failure]
        chances.free = 0
        hopeless = rule.again is RetryScope.NOTHING or (rule.where is RetryTarget.ELSEWHERE and len(known) == 1)

        assert chances.take(failed, known) is not hopeless
        assert chances.left == hopeless
        expected = known if rule.where is RetryTarget.ANY or len(known) == 1 else known[1:]
        assert list(chances.among(known)) == expected


def test_chances_run_out():
    """A request that kills engines must not kill them all."""
    known = engines(Role.PREFILL, 9)
    chances = RetryAttempts(2)
    taken = [chances.take(LegFailed(one, ERRORS[Failure.BAD_RESPONSE]), known) for one in known[:4]]

    assert taken == [True, True, False, False]


def test_when_all_have_failed_all_are_candidates_again():
    """A short trouble is more likely than that all are gone."""
    known = engines(Role.DECODE, 2)
    chances = RetryAttempts(5)
    for one in known:
        chances.take(LegFailed(one, ERRORS[Failure.BAD_RESPONSE]), known)

    assert chances.among(known) == known


def test_engines_that_have_failed_come_last():
    """All are listed: where any engine will do, one that has failed is better than none."""
    chances = RetryAttempts(1, {InstanceId("decode-0"), InstanceId("decode-2")})
    first = chances.first(engines(Role.DECODE, 4))

    assert [instance.id for instance in first] == ["decode-1", "decode-3", "decode-0", "decode-2"]


def test_a_closed_idle_connection_takes_no_chance_but_not_for_ever():
    """Of an engine that closes each connection the request would be sent to it without end."""
    known = engines(Role.DECODE, 1)
    chances = RetryAttempts(1)
    closed = LegFailed(known[0], ERRORS[Failure.CONNECTION_CLOSED])
    taken = [(chances.take(closed, known), chances.is_charged, chances.left) for _ in range(4)]

    assert taken == [(True, False, 1), (True, True, 0), (False, True, 0), (False, True, 0)]


def test_without_retries_only_what_no_engine_can_have_read_is_sent_again():
    """It cannot be known whether an engine that closes a connection has read the request before."""
    known = engines(Role.DECODE, 1)
    for was_sent in (True, False):
        closed = LegFailed(known[0], ConnectionStale("closed", was_sent=was_sent))
        chances = RetryAttempts(0)
        assert [chances.take(closed, known) for _ in range(2)] == [not was_sent, False]


ALONE = [failure for failure, verdict in VERDICTS.items() if verdict.prefill.may_be_alone]


@pytest.mark.parametrize("failure", Failure)
def test_a_decode_engine_serves_alone_when_no_other_prefill_engine_is_left(failure):
    """It has had nothing of the request: engines bear that in any case, and nothing is charged."""
    known = engines(Role.PREFILL, 1)
    chances = RetryAttempts(1)
    taken = chances.take(LegFailed(known[0], ERRORS[failure]), known, may_be_alone=True)

    assert chances.is_alone == (failure in ALONE)
    if chances.is_alone:
        assert (taken, chances.left, chances.is_charged) == (True, 0, False)


@pytest.mark.parametrize(("retries", "fails"), [(1, 1), (2, 2), (3, 3)])
def test_the_last_retry_is_not_lost_to_a_third_prefill_engine(retries, fails):
    """Many fail at the same time: a rack, or the network to it."""
    known = engines(Role.PREFILL, 9)
    chances = RetryAttempts(retries)
    for one in known[:fails]:
        assert not chances.is_alone
        assert chances.take(LegFailed(one, ERRORS[Failure.UNREACHABLE]), known, may_be_alone=True)

    assert chances.is_alone == (retries > 1)


def test_a_decode_engine_that_serves_alone_speaks_for_the_prefill_engine_too():
    """It has computed the same prompt."""
    prefill = engines(Role.PREFILL, 1)
    decode = engines(Role.DECODE, 1)
    chances = RetryAttempts(2)
    chances.take(LegFailed(prefill[0], ERRORS[Failure.HTTP_5XX]), prefill, may_be_alone=True)

    assert chances.is_suspect
    assert chances.guilty(decode[0]) == [(prefill[0], Failure.HTTP_5XX)]
    assert chances.guilty(decode[0]) == ()
