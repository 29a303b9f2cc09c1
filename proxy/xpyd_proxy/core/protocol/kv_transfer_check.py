"""Whether the KV cache that a decode engine was promised has reached it.

An engine that gets none computes the prompt itself: the answer is right, the prefill engine was for nothing, and no
status says so. vLLM tells in one place, ``usage.prompt_tokens_details.cached_tokens``
(``--enable-prompt-tokens-details``, and on streams ``include_usage``). It is the decode engine's own number only while
the parameters of the transfer hold no ``remote_prefill_cached_tokens``: with that it repeats the prefill engine's,
whatever has arrived. So it tells something when both legs went out at once (push), and nothing when one followed the
other.
"""

from typing import Final

from xpyd_proxy.core.fast_enum import FastStrEnum
from xpyd_proxy.core.raw_json import NotJson, decode
from xpyd_proxy.core.schemas import UsageReport

_LAST_EVENTS: Final = 4  # the usage stands before [DONE]; comments may come between
_NAME: Final = b"cached_tokens"


class Arrival(FastStrEnum):
    """What a decode leg says about the KV cache it was promised."""

    ARRIVED = "arrived"
    NONE = "none"  # it has computed the whole prompt itself
    UNKNOWN = "unknown"  # it does not say


def arrival(end: bytes) -> Arrival:
    """Read a whole answer, or the last events of a streamed one."""
    if end.find(_NAME) < 0 and end.find(b"\\u") < 0:  # a name may be written in escapes
        return Arrival.UNKNOWN
    for text in (end, *_events(end)):
        if (cached := _cached(text)) is not None:
            return Arrival.ARRIVED if cached else Arrival.NONE
    return Arrival.UNKNOWN


def _events(end: bytes) -> list[bytes]:
    """Return the data of the last events, the last one first."""
    data = [line[5:].strip() for line in end.splitlines() if line.startswith(b"data:")]
    return data[: -_LAST_EVENTS - 1 : -1]


def _cached(text: bytes) -> int | None:
    try:
        usage = decode(text, UsageReport).usage
    except NotJson:
        return None
    return usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None
