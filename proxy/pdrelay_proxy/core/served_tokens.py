"""Counts the tokens of prompt and answer that a client was served, for quotas and fair shares."""

from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.usage import prompt_of
from pdrelay_proxy.core.raw_json import maybe
from pdrelay_proxy.core.request_record import CLIENT_CLOSED_REQUEST, RequestRecord
from pdrelay_proxy.core.schemas import BilledAnswer, ServedAnswer, ServedUsage

_NAME: Final = b'"usage"'
_DATA: Final = b"data:"
_EMBED: Final = "/v2/embed"  # Cohere's API: units in its meta in place of a usage
# These count input_tokens and output_tokens alone, all others prompt_tokens and completion_tokens
# where they have them: which words /v1/decisions has is up to vLLM 0.33.
_INPUT: Final = frozenset({Api.RESPONSES.value, Api.MESSAGES.value, "/v1/systemone"})
_ASKED: Final = frozenset({Api.COMPLETIONS.value, Api.CHAT.value})
_DONE: Final = b"data: [DONE]"
_ERROR: Final = b'"error"'
_RESPONSES: Final = Api.RESPONSES.value


def served_tokens(record: RequestRecord, status: int, prompt: int, events: int) -> int:
    """Return the tokens of a request that is over with this status.

    ``prompt``: estimated tokens of its prompt; ``events``: of its stream. Engines count tokens in
    the usage at the end of an answer. A stream without usage, or one that broke off, counts one
    token an event, and the prefill engine's count of its prompt. Refused and failed requests cost
    nothing.
    """
    if status >= 400 and status != CLIENT_CLOSED_REQUEST:
        return 0
    # prompts of later legs include part of the answer
    prefill_leg = record.prefill if not record.moves else record.moves[0].prefill
    if prefill_leg is not None and prefill_leg.tokens is not None:
        prompt = prefill_leg.tokens
    counted, answered = _counted(record.path, b"".join(record.end))
    prompt = prompt if counted is None else counted
    return prompt + (events if answered is None else answered)


def ends_without_usage(record: RequestRecord) -> bool:
    """Tell whether an answer is a whole stream of an API in which usage has to be asked for, and
    has none.
    """
    if record.path not in _ASKED:
        return False
    end = b"".join(record.end)
    return (
        end.rstrip().endswith(_DONE) and end.find(_ERROR) < 0 and _usage(record.path, end) is None
    )


def _counted(path: str, end: bytes) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer in the end of an answer; None: unknown."""
    if path == _EMBED:
        billed = maybe(end, BilledAnswer)
        units = None if billed is None or billed.meta is None else billed.meta.billed_units
        return (None, None) if units is None else (units.input_tokens, units.image_tokens)
    usage = _usage(path, end)
    if usage is None:
        return None, None
    if path in _INPUT:
        usage.prompt_tokens = None
        return prompt_of(usage), usage.output_tokens
    answered = usage.completion_tokens
    return prompt_of(usage), usage.output_tokens if answered is None else answered


def _usage(path: str, end: bytes) -> ServedUsage | None:
    """Return the last usage of the answer itself: a response repeats the tools of its request,
    which may look like one.

    ``end``: a whole answer, or the last lines of a stream.
    """
    for text in [end] if end.lstrip()[:1] == b"{" else _events(end):
        parsed = maybe(text, ServedAnswer) if text.find(_NAME) >= 0 else None
        if parsed is not None:
            inside = parsed.response if path == _RESPONSES else None
            usage = parsed.usage if inside is None else inside.usage
            if usage is not None:
                return usage
    return None


def _events(end: bytes) -> Sequence[bytes]:
    """Return the data of the events, the last one first."""
    return [line[len(_DATA) :] for line in reversed(end.splitlines()) if line.startswith(_DATA)]
