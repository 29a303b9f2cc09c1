"""The errors for engines' answers other than 200, as the fault table judges them."""

from typing import Final

from pdrelay_proxy.core.model import EngineResponse, Instance, Role
from pdrelay_proxy.core.protocol.fault_table import BodyShape, Failure, failure_of_answer
from pdrelay_proxy.core.protocol.response_filter import clean_answer
from pdrelay_proxy.core.raw_json import NULL, Fields, maybe
from pdrelay_proxy.core.schemas import ErrorBody
from pdrelay_proxy.errors import (
    AnswerRefused,
    EngineBusy,
    EngineError,
    EngineFault,
    KeyRefused,
    NoSuchPath,
    Refused,
)

JSON: Final = "application/json"
_JSON: Final = JSON.encode()
# shown to clients, also from a decode engine's 5xx
_SHOWN_SHAPES: Final = frozenset({BodyShape.ERROR, BodyShape.WORD})


def leg_error(engine: Instance, answer: EngineResponse) -> Refused | EngineError:
    """Return the error to raise for a leg that was not answered with 200."""
    status = answer.status
    shape = body_shape(answer.body)
    name = engine.id
    failure = failure_of_answer(status, shape)
    if failure is Failure.NO_SUCH_PATH:
        return NoSuchPath(status, JSON, _words(name, shape, answer.body))
    # A prefill engine's message in a 5xx may be about its internals.
    is_shown = shape in _SHOWN_SHAPES and (status < 500 or engine.role is Role.DECODE)
    if failure is Failure.REFUSED or (failure in (Failure.BUSY, Failure.HTTP_5XX) and is_shown):
        return Refused(status, JSON, _words(name, shape, answer.body))
    if failure is Failure.WRONG_KEY:
        return KeyRefused(f"{name} does not accept the key of this router")
    error_type = (
        EngineBusy
        if failure is Failure.BUSY
        else EngineFault
        if failure is Failure.HTTP_5XX
        else EngineError
    )
    work = "prefill" if engine.role is Role.PREFILL else "decode"
    return error_type(f"{name} failed to {work}: it answered with status {status}")


def refusal(engine: str, status: int, body: bytes) -> Refused:
    """Return the error for a stream's error event that becomes the client's answer."""
    return Refused(status, JSON, _words(engine, BodyShape.ERROR, body))


def words_of(error: bytes) -> str | None:
    """Return the message of an engine's error; None: it has none."""
    parsed = maybe(error, ErrorBody)
    if parsed is None or isinstance(parsed.error, str):
        return None if parsed is None else str(parsed.error)
    return maybe(parsed.error.get("message", NULL), str)


def body_shape(body: bytes) -> BodyShape:
    """Return the shape of an answer's body; vLLM up to 0.10 wrote errors without ``error``."""
    fields = maybe(body, Fields)
    if fields is None:
        return BodyShape.OTHER if body.strip() else BodyShape.EMPTY
    error = fields.get("error", NULL)
    if maybe(error, Fields) is not None:
        return BodyShape.ERROR
    if maybe(error, str) is not None:
        return BodyShape.WORD
    if "message" in fields and ("type" in fields or "code" in fields):
        return BodyShape.ERROR
    return BodyShape.DETAIL if "detail" in fields else BodyShape.OTHER


def _words(engine: str, shape: BodyShape, body: bytes) -> bytes:
    """Return the part of an engine's error that the client may read: nothing of HTML, or of JSON
    that the filter does not clean.
    """
    if shape is BodyShape.OTHER:
        return b""
    try:
        return clean_answer(engine, _JSON, body)
    except AnswerRefused:
        return b""
