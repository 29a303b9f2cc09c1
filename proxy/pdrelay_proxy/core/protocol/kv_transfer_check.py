"""Checks whether the KV cache that a decode engine was promised has reached it.

An engine without it computes the prompt itself: the answer is right, the prefill engine's work is
lost, and no status shows it. vLLM shows it in one place,
``usage.prompt_tokens_details.cached_tokens`` (``--enable-prompt-tokens-details``, and on streams
``include_usage``). That is the decode engine's own number only if the transfer's parameters have no
``remote_prefill_cached_tokens``: with it, the decode engine repeats the prefill engine's number,
whatever has arrived. So it is meaningful when both legs went out at once (push), and meaningless
when one followed the other.
"""

from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.core.schemas import UsageReport

_LAST_EVENTS: Final = 4  # the usage stands before [DONE]; comments may come between
_NAME: Final = b"cached_tokens"


class Arrival(FastStrEnum):
    """Whether a decode leg got the KV cache that it was promised."""

    ARRIVED = "arrived"
    NONE = "none"  # it computed the whole prompt itself
    UNKNOWN = "unknown"  # no usage, or without the field


def arrival(end: bytes) -> Arrival:
    """Read a whole answer, or the last events of a streamed one."""
    counts = _token_counts(end)
    if counts is None:
        return Arrival.UNKNOWN
    return Arrival.ARRIVED if counts[0] else Arrival.NONE


def cached_share(end: bytes) -> float | None:
    """Return the share of its prompt that an engine had cached, by its answer's end."""
    counts = _token_counts(end)
    return None if counts is None or not counts[1] else counts[0] / counts[1]


def _token_counts(end: bytes) -> tuple[int, int | None] | None:
    """Return the cached tokens, and those of the prompt."""
    if end.find(_NAME) < 0 and end.find(b"\\u") < 0:  # a name may have escapes
        return None
    for text in (end, *_events(end)):
        try:
            usage = decode(text, UsageReport).usage
        except NotJson:
            continue
        details = None if usage is None else usage.prompt_tokens_details
        if usage is not None and details is not None and details.cached_tokens is not None:
            return details.cached_tokens, usage.prompt_tokens
    return None


def _events(end: bytes) -> list[bytes]:
    """Return the data of the last events, the last one first."""
    data = [line[5:].strip() for line in end.splitlines() if line.startswith(b"data:")]
    return data[: -_LAST_EVENTS - 1 : -1]
