"""Answers that an engine has given up: they have status 200, an end, and a part of the text, or
none.

A vLLM engine that shuts down, is paused, or recovers from a fault ends all of its requests with the
finish reason ``abort`` (``_send_abort_outputs`` in vllm/v1/engine/core.py), and so each one that
comes while it still drains. A stream without a token has no finish reason then, Anthropic's stop
reason is null. /v1/responses says ``completed``, but for models with Harmony: so it shows only
where there is no token.

What an answer of /v1/responses repeats of its request is its client's: only its own members count.
"""

from typing import Final

from pdrelay_proxy.core.raw_json import maybe
from pdrelay_proxy.core.schemas import FinishedAnswer, ServedAnswer, ServedInside
from pdrelay_proxy.errors import EngineError

_FINISH: Final = b'"finish_reason":'
_STOP: Final = b'"stop_reason":'
_NO_STOP: Final = b'"stop_reason":null'
_ABORT: Final = b'"abort"'
_NULL: Final = b"null"
_NO_TEXT: Final = b'"content":""'  # a chat begins so
# every answer has a token, if only its end
_NO_COMPLETION: Final = b'"completion_tokens":0'
_NO_OUTPUT: Final = b'"output_tokens":0'
_CANCELLED: Final = "cancelled"
_IS_CANCELLED: Final = b'"status":"cancelled"'
_MESSAGE: Final = b'"type":"message"'
_SIGNS: Final = (_ABORT, _NO_OUTPUT, _IS_CANCELLED)
_DATA: Final = b"\ndata:"
MESSAGE_STOP: Final = b"message_stop"
COMPLETED: Final = b"response.completed"


def given_up(engine: str) -> EngineError:
    """Return the error for such an answer."""
    return EngineError(f"{engine} gave up its answer: it shuts down, or is paused")


def is_given_up(answer: bytes) -> bool:
    """Tell whether a whole answer is one."""
    if not (
        any([answer.find(sign) >= 0 for sign in _SIGNS])  # noqa: C419 (compiled, a generator takes longer)
        or (answer.find(_MESSAGE) >= 0 and answer.find(_NO_STOP) >= 0)
    ):
        return False
    said = maybe(answer, FinishedAnswer)
    if said is None:
        return False
    if (said.type == "message" and said.stop_reason is None) or _has_no_answer(said):
        return True
    return any([choice.finish_reason == "abort" for choice in said.choices])  # noqa: C419 (compiled, a generator takes longer)


def was_given_up(events: bytes, name: bytes) -> bool:
    """Tell whether a stream that ends with these events is one; ``name``: of the last event, if it
    has one.
    """
    if name == COMPLETED:
        return _is_empty_response(events)
    if name == MESSAGE_STOP:
        at = events.rfind(_STOP)
        has_no_reason = events.startswith(_NULL, at + len(_STOP))
        return at >= 0 and (has_no_reason or events.find(_NO_OUTPUT, at) >= 0)
    at = events.rfind(_FINISH)
    if at < 0:
        return events.find(_NO_COMPLETION) >= 0
    if events.startswith(_ABORT, at + len(_FINISH)):
        return True
    if not events.startswith(_NULL, at + len(_FINISH)):
        return False
    # other engines than vLLM may give no reason behind a text
    return events.find(_NO_TEXT, max(events.rfind(_DATA, 0, at), 0), at) >= 0


def _is_empty_response(events: bytes) -> bool:
    if events.find(_NO_OUTPUT) < 0 and events.find(_IS_CANCELLED) < 0:
        return False
    said = maybe(events[events.rfind(_DATA) + len(_DATA) :], ServedAnswer)
    response = None if said is None else said.response
    return response is not None and _has_no_answer(response)


def _has_no_answer(said: ServedInside) -> bool:
    has_no_token = said.usage is not None and said.usage.output_tokens == 0
    return has_no_token or said.status == _CANCELLED
