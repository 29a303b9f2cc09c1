"""Whose fault a failed leg is: the whole table, and every way into it."""

import errno
import itertools

import pytest

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.fault_table import (
    VERDICTS,
    BodyShape,
    Failure,
    Fault,
    Held,
    RetryScope,
    RetryTarget,
    failure_of,
    failure_of_answer,
    is_engines,
    retry_rule,
    unreached,
)
from pdrelay_proxy.errors import (
    AnswerRefused,
    ConnectionStale,
    EngineBusy,
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
from pdrelay_proxy.requests.error_body import error_answer

ERRORS = [
    (EngineError("x", reached=False), Failure.UNREACHABLE),
    (EngineTimeout("did not accept a connection", reached=False), Failure.UNREACHABLE),
    (EngineError("x"), Failure.BAD_RESPONSE),
    (EngineFault("x"), Failure.HTTP_5XX),
    (EngineTimeout("x"), Failure.TIMEOUT),
    (EngineBusy("x"), Failure.BUSY),
    (Moved("x"), Failure.ENGINE_RESTARTED),
    (NoKvParams("x"), Failure.NO_KV_PARAMS),
    (KeyRefused("x"), Failure.WRONG_KEY),
    (AnswerRefused("x"), Failure.ANSWER_REFUSED),
    (ConnectionStale("x"), Failure.CONNECTION_CLOSED),
    (RouterLacks("x"), Failure.ROUTER_LACKS),
    (NetworkFault("x"), Failure.NETWORK),
    (NoSuchPath(404, "t", b""), Failure.NO_SUCH_PATH),
    (Refused(400, "t", b""), Failure.REFUSED),
    (Refused(401, "t", b""), Failure.REFUSED),
    (Refused(404, "t", b""), Failure.REFUSED),
    (Refused(404, "t", b'{"error":{"message":"The model `a` does not exist."}}'), Failure.UNKNOWN_MODEL),
    (Refused(400, "t", b'{"error":{"message":"The model `a` does not exist."}}'), Failure.REFUSED),
    (Refused(499, "t", b""), Failure.REFUSED),
    (Refused(501, "t", b""), Failure.REFUSED),
    (Refused(429, "t", b""), Failure.BUSY),
    (Refused(503, "t", b""), Failure.BUSY),
    (Refused(500, "t", b""), Failure.HTTP_5XX),
]
STATUS = dict.fromkeys(Failure, 502) | {Failure.TIMEOUT: 504, Failure.BUSY: 503, Failure.ROUTER_LACKS: 503}


@pytest.mark.parametrize(("error", "failure"), ERRORS)
def test_errors_are_sorted_by_what_may_have_happened_at_the_engine(error, failure):
    """Its status or its kind says it."""
    assert failure_of(error) is failure


def test_every_failure_has_a_verdict_and_an_error_that_leads_to_it():
    """What is not in the table is a bug."""
    assert VERDICTS.keys() == set(Failure)
    assert {failure for _, failure in ERRORS} == set(Failure)


def test_each_leg_can_fail_in_each_way_but_for_two():
    """Only a prefill engine says where it is, and keeps KV for others."""
    impossible = []
    for role, failure in itertools.product(Role, Failure):
        try:
            retry_rule(role, failure)
        except ValueError:
            impossible.append((role, failure))

    assert impossible == [(Role.DECODE, Failure.ENGINE_RESTARTED), (Role.DECODE, Failure.NO_KV_PARAMS)]


def test_what_is_the_clients_fault_is_told_at_once_and_costs_nobody_else():
    """One client's mistake must not cost another's request."""
    for failure, verdict in VERDICTS.items():
        is_clients = verdict.fault is Fault.CLIENT
        assert is_engines(failure) is (verdict.fault is Fault.ENGINE)
        if is_clients:
            assert verdict.held is Held.NEVER
            # Of a model that one engine does not know, another one may have the last word.
            again = RetryScope.PAIR if failure is Failure.UNKNOWN_MODEL else RetryScope.NOTHING
            assert {verdict.prefill.again, verdict.decode.again} == {again}


def test_only_an_engines_fault_is_held_against_it():
    """Not the router's limits, not the network's troubles."""
    held = {failure: verdict.held for failure, verdict in VERDICTS.items() if verdict.held is not Held.NEVER}

    assert held == {
        Failure.UNREACHABLE: Held.AT_ONCE,
        Failure.TIMEOUT: Held.AT_ONCE,
        Failure.BAD_RESPONSE: Held.IF_SERVED_ELSEWHERE,
        Failure.HTTP_5XX: Held.IF_SERVED_ELSEWHERE,
    }
    assert {VERDICTS[failure].fault for failure in held} == {Fault.ENGINE}
    assert [failure for failure in held if not VERDICTS[failure].is_spared] == [Failure.UNREACHABLE]


def test_what_is_held_against_an_engine_proves_no_life():
    """And a failure that leaves it alone says that it lives only if it has answered."""
    silent = {failure for failure, verdict in VERDICTS.items() if not verdict.proves_life}

    assert silent == {
        *(failure for failure, verdict in VERDICTS.items() if verdict.held is not Held.NEVER),
        Failure.CONNECTION_CLOSED,
        Failure.ROUTER_LACKS,
        Failure.NETWORK,
    }


def test_only_a_decode_engine_that_got_nothing_is_replaced_alone():
    """Any other may have told P to free the blocks: the same parameters could lead to another request's."""
    alone = [failure for failure, verdict in VERDICTS.items() if verdict.decode and verdict.decode.again == "decode"]

    assert alone == [Failure.UNREACHABLE, Failure.NETWORK]


def test_what_one_engine_or_the_router_itself_refuses_is_one_try():
    """Another engine would say the same, or its answer would not pass either."""
    once = {failure for failure, verdict in VERDICTS.items() if verdict.prefill.again is RetryScope.NOTHING}

    assert once == {Failure.REFUSED, Failure.NO_SUCH_PATH, Failure.ANSWER_REFUSED, Failure.ROUTER_LACKS}
    assert once == {f for f, verdict in VERDICTS.items() if verdict.decode and verdict.decode.again == "nothing"}


def test_without_another_prefill_engine_a_decode_engine_serves_alone():
    """Whatever is wrong with the only prefill engine, but not where the request or the router is at fault."""
    assert {failure for failure, verdict in VERDICTS.items() if verdict.prefill.may_be_alone} == {
        *(Failure.UNREACHABLE, Failure.BAD_RESPONSE, Failure.HTTP_5XX, Failure.TIMEOUT, Failure.BUSY),
        *(Failure.NO_KV_PARAMS, Failure.NETWORK),
    }


def test_a_closed_idle_connection_costs_no_retry():
    """It says nothing about the engine, or the request."""
    free = [failure for failure, verdict in VERDICTS.items() if verdict.prefill.is_free]

    assert free == [Failure.CONNECTION_CLOSED]
    assert VERDICTS[Failure.CONNECTION_CLOSED].decode.where is RetryTarget.ANY


@pytest.mark.parametrize(("error", "failure"), ERRORS)
def test_the_client_is_told_what_kind_of_failure_it_was(error, failure):
    """A connection that is not accepted in time is a timeout to the client; it has reached no engine all the same."""
    status = error_answer(error, "/v1/completions").status
    if isinstance(error, Refused):
        assert status == error.status
    elif not (isinstance(error, EngineTimeout) and not error.reached):
        assert status == STATUS[failure]


@pytest.mark.parametrize("shape", BodyShape)
def test_every_status_has_a_meaning(shape):
    """In each shape, with the router's key and with the client's own."""
    for status, is_told in itertools.product(range(100, 1000), (True, False)):
        failure = failure_of_answer(status, shape, is_shown=is_told)

        assert (failure is None) == (status == 200)
        if failure is None:
            continue
        verdict = VERDICTS[failure]
        if status < 400:
            assert failure is Failure.BAD_RESPONSE
        elif status in (429, 503):
            assert failure is Failure.BUSY
        elif status in (401, 407) or (status == 403 and shape is BodyShape.WORD):
            assert failure is (Failure.REFUSED if is_told else Failure.WRONG_KEY)
        elif status in (404, 405) and shape is not BodyShape.ERROR:
            assert failure is Failure.NO_SUCH_PATH
        elif status < 500 or status == 501:
            assert (failure, verdict.fault) == (Failure.REFUSED, Fault.CLIENT)
        else:
            assert failure is Failure.HTTP_5XX


OWN_LACKS = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL]


@pytest.mark.parametrize(
    ("number", "is_name", "failure"),
    [
        *((lack, False, Failure.ROUTER_LACKS) for lack in OWN_LACKS),
        (errno.ENETUNREACH, False, Failure.NETWORK),
        (errno.ENETDOWN, False, Failure.NETWORK),
        (-2, True, Failure.NETWORK),
        (-3, True, Failure.NETWORK),
        (errno.ECONNREFUSED, False, Failure.UNREACHABLE),
        (errno.EHOSTUNREACH, False, Failure.UNREACHABLE),
        (errno.ECONNRESET, False, Failure.UNREACHABLE),
        (None, False, Failure.UNREACHABLE),
    ],
)
def test_a_connection_that_cannot_be_opened_is_judged_by_its_errno(number, is_name, failure):
    """A router without descriptors must not take its engines for dead."""
    error = unreached("decode-0", number, is_name=is_name)

    assert failure_of(error) is failure
    assert not error.reached
    assert "decode-0" in str(error)
