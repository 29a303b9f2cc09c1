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

from pdrelay_proxy.core.raw_json import maybe, value_at
from pdrelay_proxy.core.schemas import (
    DeltaEvent,
    FinishedAnswer,
    ServedAnswer,
    ServedInside,
    ServedUsage,
)
from pdrelay_proxy.errors import EngineError

_FINISH: Final = b'"finish_reason"'
_MESSAGE_DELTA: Final = b'"message_delta"'
_COMPLETION: Final = b'"completion_tokens"'
_OUTPUT: Final = b'"output_tokens"'  # in each answer of /v1/responses and /v1/messages
_ABORT: Final = b'"abort"'
_CANCELLED: Final = "cancelled"
_IS_CANCELLED: Final = b'"cancelled"'
_NULL: Final = b"null"
_ZERO: Final = b"0"
_DATA: Final = b"\ndata:"
MESSAGE_STOP: Final = b"message_stop"
COMPLETED: Final = b"response.completed"


def given_up(engine: str) -> EngineError:
    """Return the error for such an answer."""
    return EngineError(f"{engine} gave up its answer: it shuts down, or is paused")


def is_given_up(answer: bytes) -> bool:
    """Tell whether a whole answer is one."""
    if answer.find(_ABORT) < 0 and answer.find(_OUTPUT) < 0 and answer.find(_IS_CANCELLED) < 0:
        return False
    said = maybe(answer, FinishedAnswer)
    if said is None:
        return False
    if said.type == "message":
        return said.stop_reason is None or _counts_none(said.usage)
    if said.object == "response":
        return _has_no_answer(said)
    return any([choice.finish_reason == "abort" for choice in said.choices])  # noqa: C419 (compiled, a generator takes longer)


def was_given_up(events: bytes, name: bytes) -> bool:
    """Tell whether a stream that ends with these events is one; ``name``: of the last event, if it
    has one.
    """
    if name == COMPLETED:
        said = maybe(events[events.rfind(_DATA) + len(_DATA) :], ServedAnswer)
        return said is not None and said.response is not None and _has_no_answer(said.response)
    if name == MESSAGE_STOP:
        end = _event_at(events, events.rfind(_MESSAGE_DELTA))
        return end is not None and (
            (end.delta is not None and end.delta.stop_reason is None) or _counts_none(end.usage)
        )
    reason = _last_value(events, _FINISH)
    if reason < 0:  # every answer has a token, if only its end
        tokens = _last_value(events, _COMPLETION)
        return tokens >= 0 and events.startswith(_ZERO, tokens)
    if not events.startswith(_NULL, reason):
        return events.startswith(_ABORT, reason)
    # a chat begins without a text; other engines than vLLM may give no reason behind one
    begun = _event_at(events, reason)
    return begun is not None and any(
        [choice.delta is not None and choice.delta.content == "" for choice in begun.choices]  # noqa: C419 (compiled, a generator takes longer)
    )


def _event_at(events: bytes, place: int) -> DeltaEvent | None:
    """Return the event around a place; None: there is none."""
    if place < 0:
        return None
    start = events.rfind(_DATA, 0, place) + len(_DATA)
    return maybe(events[start : events.find(b"\n", place)], DeltaEvent)


def _last_value(events: bytes, name: bytes) -> int:
    """Return where the value of the last member of that name begins; -1: there is none."""
    name_at = events.rfind(name)
    while name_at >= 0:
        value = value_at(events, name_at + len(name))
        if value >= 0:
            return value
        name_at = events.rfind(name, 0, name_at)
    return -1


def _has_no_answer(said: ServedInside) -> bool:
    return _counts_none(said.usage) or said.status == _CANCELLED


def _counts_none(usage: ServedUsage | None) -> bool:
    return usage is not None and usage.output_tokens == 0
