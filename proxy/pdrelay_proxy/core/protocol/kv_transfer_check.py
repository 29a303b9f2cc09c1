"""Whether the KV cache that a decode engine was promised has reached it.

An engine that gets none computes the prompt itself: the answer is right, the prefill engine was for
nothing, and no status says so. vLLM tells in one place,
``usage.prompt_tokens_details.cached_tokens`` (``--enable-prompt-tokens-details``, and on streams
``include_usage``). It is the decode engine's own number only while the parameters of the transfer
hold no ``remote_prefill_cached_tokens``: with that it repeats the prefill engine's, whatever has
arrived. So it tells something when both legs went out at once (push), and nothing when one followed
the other.
"""

from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.core.schemas import UsageReport

_LAST_EVENTS: Final = 4  # the usage stands before [DONE]; comments may come between
_NAME: Final = b"cached_tokens"


class Arrival(FastStrEnum):
    """What a decode leg says about the KV cache it was promised."""

    ARRIVED = "arrived"
    NONE = "none"  # it has computed the whole prompt itself
    UNKNOWN = "unknown"  # it does not say


def arrival(end: bytes) -> Arrival:
    """Read a whole answer, or the last events of a streamed one."""
    found = _found(end)
    if found is None:
        return Arrival.UNKNOWN
    return Arrival.ARRIVED if found[0] else Arrival.NONE


def cached_share(end: bytes) -> float | None:
    """Return which share of its prompt an engine had in its cache, as the end of its answer says;
    None: it does not.
    """
    found = _found(end)
    return None if found is None or not found[1] else found[0] / found[1]


def _found(end: bytes) -> tuple[int, int | None] | None:
    """Return the tokens that were cached, and those of the prompt."""
    if end.find(_NAME) < 0 and end.find(b"\\u") < 0:  # a name may be written in escapes
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
