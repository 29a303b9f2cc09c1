"""Answers that an engine has given up: they have status 200, an end, and a part of the text, or
none.

A vLLM engine that shuts down, is paused, or recovers from a fault ends all of its requests with the
finish reason ``abort`` (``_send_abort_outputs`` in vllm/v1/engine/core.py), and so each one that
comes while it still drains. A stream without a token has no finish reason then, Anthropic's stop
reason is null, and /v1/responses says ``completed``: that shows only where there is no token.
"""

from typing import Final

from pdrelay_proxy.core.raw_json import maybe
from pdrelay_proxy.core.schemas import FinishedAnswer, ServedAnswer
from pdrelay_proxy.errors import EngineError

_FINISH: Final = b'"finish_reason":'
_STOP: Final = b'"stop_reason":'
_NO_STOP: Final = b'"stop_reason":null'
_ABORT: Final = b'"abort"'
_NULL: Final = b"null"
_UNFINISHED: Final = (_ABORT, _NULL)
# every answer has a token, if only its end
_NO_COMPLETION: Final = b'"completion_tokens":0'
_NO_OUTPUT: Final = b'"output_tokens":0'
_DATA: Final = b"\ndata:"


def given_up(engine: str) -> EngineError:
    """Return the error for such an answer."""
    return EngineError(f"{engine} gave up its answer: it shuts down, or is paused")


def is_given_up(answer: bytes) -> bool:
    """Tell whether a whole answer is one."""
    if answer.find(_ABORT) < 0 and answer.find(_NO_OUTPUT) < 0 and answer.find(_NO_STOP) < 0:
        return False
    said = maybe(answer, FinishedAnswer)
    if said is None:
        return False
    if said.type == "message" and said.stop_reason is None:
        return True
    if said.usage is not None and said.usage.output_tokens == 0:
        return True
    return any([choice.finish_reason == "abort" for choice in said.choices])  # noqa: C419 (compiled, a generator takes longer)


def was_given_up(events: bytes) -> bool:
    """Tell whether a stream that ends with these events is one."""
    at = events.rfind(_FINISH)
    if at >= 0:
        return events.startswith(_UNFINISHED, at + len(_FINISH))
    at = events.rfind(_STOP)
    if at >= 0:
        return events.startswith(_NULL, at + len(_STOP)) or events.find(_NO_OUTPUT, at) >= 0
    if events.find(_NO_OUTPUT) < 0:
        return events.find(_NO_COMPLETION) >= 0
    # what stands in an answer of /v1/responses may be a client's
    said = maybe(events[events.rfind(_DATA) + len(_DATA) :], ServedAnswer)
    response = None if said is None else said.response
    return response is not None and response.usage is not None and response.usage.output_tokens == 0
