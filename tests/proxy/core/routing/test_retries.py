"""Which failures are worth another try."""

import pytest

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.model import Instance, InstanceId, Role
from xpyd_proxy.core.protocol.fault_table import VERDICTS, Failure, RetryScope, RetryTarget
from xpyd_proxy.core.routing.retries import LegFailed, RetryAttempts
from xpyd_proxy.errors import (
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
        failed, chances = LegFailed(known[0], ERRORS[failure]), RetryAttempts(1)
        rule = RULES[role, failure]
        hopeless = rule.again is RetryScope.NOTHING or (rule.where is RetryTarget.ELSEWHERE and len(known) == 1)

        assert chances.take(failed, known) is not hopeless
        assert chances.left == hopeless
        expected = known if rule.where is RetryTarget.ANY or len(known) == 1 else known[1:]
        assert list(chances.among(known)) == expected


def test_chances_run_out():
    """A request that kills engines must not kill them all."""
    known, chances = engines(Role.PREFILL, 9), RetryAttempts(2)
    taken = [chances.take(LegFailed(one, ERRORS[Failure.BAD_RESPONSE]), known) for one in known[:4]]

    assert taken == [True, True, False, False]


def test_when_all_have_failed_all_are_candidates_again():
    """A short trouble is more likely than that all are gone."""
    known, chances = engines(Role.DECODE, 2), RetryAttempts(5)
    for one in known:
        chances.take(LegFailed(one, ERRORS[Failure.BAD_RESPONSE]), known)

    assert chances.among(known) == known


def test_engines_that_have_failed_come_last():
    """All are listed: where any engine will do, one that has failed is better than none."""
    chances = RetryAttempts(1, {InstanceId("decode-0"), InstanceId("decode-2")})
    first = chances.first(engines(Role.DECODE, 4))

    assert [instance.id for instance in first] == ["decode-1", "decode-3", "decode-0", "decode-2"]
