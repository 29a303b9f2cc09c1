"""Whose fault a failed leg is, and what follows: one table for all endpoints, both legs and both
kinds of answers.

An answer is classified by its status and the shape of its body (``failure_of_answer``), an
exception by its class (``failure_of``), and a connection that could not be opened by its errno
(``unreached``). The verdict on each failure decides the retry, and whether it counts against the
engine; the client's answer follows from the error (requests/error_body.py). The endpoint plays no
part.
"""

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import auto
from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.model import Role
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
    NoModelName,
    NoSuchPath,
    Refused,
    RouterLacks,
)

BUSY: Final = frozenset({429, 503})  # statuses of a healthy engine without room
_NO_PATH: Final = frozenset({404, 405})
_KEY: Final = frozenset({401, 407})
# vLLM's message, the same in all APIs (``_check_model`` in
# vllm/entrypoints/serve/engine/serving.py).
_NO_MODEL: Final = re.compile(rb"The model [^\n]{1,1000} does not exist")
# vLLM's NotImplementedError, in vllm/entrypoints/serve/exception_handling/error_response.py: this
# model or build does not support the request
_NOT_IMPLEMENTED: Final = 501
# The router's own process lacks a resource: descriptors, buffers, memory, ports (connect(2),
# socket(2)).
_ROUTER_LACKS: Final[Mapping[int, str]] = {
    errno.EMFILE: "descriptors (EMFILE)",
    errno.ENFILE: "descriptors (ENFILE)",
    errno.ENOBUFS: "network buffers (ENOBUFS)",
    errno.ENOMEM: "memory (ENOMEM)",
    errno.EADDRNOTAVAIL: "local ports (EADDRNOTAVAIL)",
}
_NETWORK: Final = frozenset({errno.ENETDOWN, errno.ENETUNREACH})


class Fault(FastStrEnum):
    """Whose fault a failure is."""

    CLIENT = auto()
    ENGINE = auto()
    ROUTER = auto()  # its limits, its settings, or a lack of resources of its machine
    NETWORK = auto()
    NOBODY = auto()


class Failure(FastStrEnum):
    """How a leg failed, as metrics, the log and headers name it."""

    UNREACHABLE = auto()  # no byte of the request has arrived
    BAD_RESPONSE = auto()  # it broke off, or its answer is not usable
    # the engine lives, and the request may be the cause
    HTTP_5XX = auto()
    TIMEOUT = auto()
    ENGINE_RESTARTED = auto()
    BUSY = auto()  # 503 or 429: the engine lives, and another one may have room
    # A prefill engine has computed the prompt and keeps no KV of it: it holds as much as it may. Or
    # it does not name the KV's model, and the request names none: a decode engine must not load
    # another model's.
    NO_KV_PARAMS = auto()
    REFUSED = auto()  # any other 4xx, and 501: another engine would refuse it, too
    # 404 for a model that the router believed it serves: another engine may know it
    UNKNOWN_MODEL = auto()
    # a 404 or 405 that is no API's error: the engine was started without this path
    NO_SUCH_PATH = auto()
    WRONG_KEY = auto()  # the engine does not accept the router's key
    ANSWER_REFUSED = auto()  # the router's filter or limits stopped the answer
    # the engine closed an idle connection as the request was written to it
    CONNECTION_CLOSED = auto()
    ROUTER_LACKS = auto()  # the router has no descriptor, port or memory for a connection
    NETWORK = auto()  # the name does not resolve, or there is no network


class RetryScope(FastStrEnum):
    """Which legs are sent again."""

    NOTHING = auto()
    DECODE = auto()  # the same decode leg to another engine; the prefill leg goes on
    PAIR = auto()  # both legs, under a new id


class RetryTarget(FastStrEnum):
    """Which engine may replace the one that failed."""

    ANY = auto()
    OTHER = auto()  # another engine; if there is none, the same
    ELSEWHERE = auto()  # another engine; if there is none, no retry


class Held(FastStrEnum):
    """When a failure counts against its engine."""

    NEVER = auto()
    AT_ONCE = auto()
    # As soon as another engine has served the same request well. An answer that breaks off behind
    # its beginning, and that no other engine continues, counts against it all the same
    # (core/routing/retries.py, held_to_account).
    IF_SERVED_ELSEWHERE = auto()


class BodyShape(FastStrEnum):
    """The shape of an answer's body."""

    ERROR = auto()  # an object under ``error``: vLLM, OpenAI and Anthropic
    # a string under ``error``: vLLM's check of keys, in
    # vllm/entrypoints/serve/middleware/authenticate.py
    WORD = auto()
    DETAIL = auto()  # ``detail``: FastAPI and Starlette
    OTHER = auto()  # HTML, plain text, other JSON
    EMPTY = auto()


@dataclass(frozen=True, slots=True)
class RetryRule:
    """The retry after a failed leg."""

    again: RetryScope
    where: RetryTarget = RetryTarget.OTHER
    is_free: bool = False  # it does not count among a request's retries
    # if no other prefill engine is left, a decode engine serves the request alone
    may_be_alone: bool = False


@dataclass(frozen=True, slots=True)
class FaultVerdict:
    """The consequences of a failure. A leg that cannot fail in this way has no rule."""

    fault: Fault
    held: Held
    prefill: RetryRule | None
    decode: RetryRule | None
    # it does not eject a needed engine that passes its probes: a request may be the cause
    is_spared: bool = False
    proves_life: bool = False  # the answer shows that the engine works
    loses_cache: bool = False  # the engine was, or will be, another process
    # another engine may come to its address: what the router learned of this one is forgotten
    may_move: bool = False


_NEVER, _AT_ONCE, _IF_SERVED = Held
_NO_RETRY: Final = RetryRule(RetryScope.NOTHING)
_PREFILL_AGAIN: Final = RetryRule(RetryScope.PAIR, may_be_alone=True)
_PREFILL_ELSEWHERE: Final = RetryRule(RetryScope.PAIR, RetryTarget.ELSEWHERE, may_be_alone=True)
_PAIR: Final = RetryRule(RetryScope.PAIR)
_DECODE: Final = RetryRule(RetryScope.DECODE)
_ELSEWHERE: Final = RetryRule(RetryScope.PAIR, RetryTarget.ELSEWHERE)
_ANYWHERE: Final = RetryRule(RetryScope.PAIR, RetryTarget.ANY)
_FREE: Final = RetryRule(RetryScope.PAIR, RetryTarget.ANY, is_free=True)

VERDICTS: Final[Mapping[Failure, FaultVerdict]] = {
    Failure.UNREACHABLE: FaultVerdict(
        Fault.ENGINE, _AT_ONCE, _PREFILL_AGAIN, _DECODE, loses_cache=True, may_move=True
    ),
    Failure.BAD_RESPONSE: FaultVerdict(
        Fault.ENGINE, _IF_SERVED, _PREFILL_AGAIN, _PAIR, is_spared=True, may_move=True
    ),
    Failure.HTTP_5XX: FaultVerdict(
        Fault.ENGINE, _IF_SERVED, _PREFILL_AGAIN, _PAIR, is_spared=True, may_move=True
    ),
    Failure.TIMEOUT: FaultVerdict(
        Fault.ENGINE, _AT_ONCE, _PREFILL_ELSEWHERE, _ELSEWHERE, is_spared=True, may_move=True
    ),
    Failure.ENGINE_RESTARTED: FaultVerdict(
        Fault.ENGINE, _NEVER, _ANYWHERE, None, proves_life=True, loses_cache=True
    ),
    Failure.BUSY: FaultVerdict(
        Fault.ENGINE, _NEVER, _PREFILL_ELSEWHERE, _ELSEWHERE, proves_life=True
    ),
    Failure.NO_KV_PARAMS: FaultVerdict(
        Fault.NOBODY, _NEVER, _PREFILL_ELSEWHERE, None, proves_life=True, may_move=True
    ),
    Failure.REFUSED: FaultVerdict(Fault.CLIENT, _NEVER, _NO_RETRY, _NO_RETRY, proves_life=True),
    Failure.UNKNOWN_MODEL: FaultVerdict(
        Fault.CLIENT, _NEVER, _ELSEWHERE, _ELSEWHERE, proves_life=True
    ),
    Failure.NO_SUCH_PATH: FaultVerdict(
        Fault.CLIENT, _NEVER, _NO_RETRY, _NO_RETRY, proves_life=True
    ),
    Failure.WRONG_KEY: FaultVerdict(Fault.ROUTER, _NEVER, _ELSEWHERE, _ELSEWHERE, proves_life=True),
    Failure.ANSWER_REFUSED: FaultVerdict(
        Fault.ROUTER, _NEVER, _NO_RETRY, _NO_RETRY, proves_life=True
    ),
    Failure.CONNECTION_CLOSED: FaultVerdict(Fault.NOBODY, _NEVER, _FREE, _FREE),
    Failure.ROUTER_LACKS: FaultVerdict(Fault.ROUTER, _NEVER, _NO_RETRY, _NO_RETRY),
    Failure.NETWORK: FaultVerdict(Fault.NETWORK, _NEVER, _PREFILL_AGAIN, _DECODE),
}


def retry_rule(role: Role, failure: Failure) -> RetryRule:
    """Return the retry after a failed leg of a role."""
    verdict = VERDICTS[failure]
    rule = verdict.prefill if role is Role.PREFILL else verdict.decode
    if rule is None:
        raise ValueError(f"a {role} leg cannot fail with {failure}")
    return rule


def is_engines(failure: Failure) -> bool:
    """Return whether a failure is its engine's fault, where failures of engines are shown."""
    return VERDICTS[failure].fault is Fault.ENGINE


def failure_of_answer(status: int, shape: BodyShape, *, is_shown: bool = False) -> Failure | None:
    """Return the failure of a whole answer other than an engine's 200; None: it is a 200.

    ``is_shown``: the client gets it, so it is about the request and not about the router's key.
    """
    if status == 200:
        return None
    if status in BUSY:
        return Failure.BUSY
    if not is_shown and (status in _KEY or (status == 403 and shape is BodyShape.WORD)):
        return Failure.WRONG_KEY
    if status in _NO_PATH and shape is not BodyShape.ERROR:
        return Failure.NO_SUCH_PATH
    if 400 <= status < 500 or status == _NOT_IMPLEMENTED:
        return Failure.REFUSED
    return Failure.HTTP_5XX if status >= 500 else Failure.BAD_RESPONSE


def failure_of(error: EngineError | Refused) -> Failure:
    """Return the failure of a leg."""
    match error:
        case NoSuchPath():
            return Failure.NO_SUCH_PATH
        case Refused(status=404, body=body) if _NO_MODEL.search(body) is not None:
            return Failure.UNKNOWN_MODEL
        case Refused(status=status):
            return failure_of_answer(status, BodyShape.ERROR, is_shown=True) or Failure.BAD_RESPONSE
        case RouterLacks():
            return Failure.ROUTER_LACKS
        case NetworkFault():
            return Failure.NETWORK
        case EngineError(reached=False):
            return Failure.UNREACHABLE
        case _:
            return _BY_CLASS.get(type(error), Failure.BAD_RESPONSE)


_BY_CLASS: Final[Mapping[type[Exception], Failure]] = {
    EngineFault: Failure.HTTP_5XX,
    EngineTimeout: Failure.TIMEOUT,
    EngineBusy: Failure.BUSY,
    Moved: Failure.ENGINE_RESTARTED,
    NoKvParams: Failure.NO_KV_PARAMS,
    NoModelName: Failure.NO_KV_PARAMS,
    KeyRefused: Failure.WRONG_KEY,
    AnswerRefused: Failure.ANSWER_REFUSED,
    ConnectionStale: Failure.CONNECTION_CLOSED,
}


def is_lack(number: int | None) -> bool:
    """Return whether an errno means that the router itself lacks a resource."""
    return number in _ROUTER_LACKS


def unreached(
    engine: str, number: int | None, *, is_name: bool = False, why: str | None = None
) -> EngineError:
    """Return the error for a connection that could not be opened, by its errno.

    ``is_name``: the name did not resolve; ``why``: a more specific reason, such as a certificate's
    fault.
    """
    lack = None if number is None or is_name else _ROUTER_LACKS.get(number)
    if lack is not None:
        return RouterLacks(f"the router has too few {lack} to reach {engine}")
    if is_name or number in _NETWORK:
        reason = (
            "has a name that does not resolve"
            if is_name
            else "cannot be reached: the router has no network"
        )
        return NetworkFault(f"{engine} {reason}")
    return EngineError(f"{engine} {why or 'cannot be reached'}", reached=False)


def not_accepted(engine: str) -> EngineTimeout:
    """Return the error for a connection that was not open in time."""
    return EngineTimeout(f"{engine} did not accept a connection in time", reached=False)
