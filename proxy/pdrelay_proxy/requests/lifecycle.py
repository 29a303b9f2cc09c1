"""The states of a request, and what leads from one to the next.

Every request goes this way: pull, push, one engine alone, pass-through endpoints, retries, resumed
streams, requests that wait in the queue. requests/life.py has the state of one.
"""

from collections.abc import Mapping
from enum import auto
from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum


class RequestState(FastStrEnum):
    """Where a request is."""

    RECEIVED = auto()  # its head is here; its body is read and parsed
    WAITING = auto()  # in the queue of the admission control
    ROUTING = auto()  # engines are chosen
    PREFILLING = auto()  # pull: the prefill leg is under way
    BOTH = auto()  # push: both legs are, and nothing is shown
    DECODING = auto()  # the decode leg alone is, and nothing is shown
    # the opening of a stream is shown; the decode leg is under way, and nothing of it is shown
    CONTINUING = auto()
    STREAMING = auto()  # a stream has begun to be shown
    OVER = auto()


class RequestEvent(FastStrEnum):
    """What happens to it."""

    QUEUED = auto()  # no place is free
    ADMITTED = auto()
    PULL = auto()  # the prefill leg is sent first
    PUSH = auto()  # both legs are sent
    SINGLE = auto()  # one engine serves it alone
    PREFILLED = auto()  # pull: the prefill engine has answered, and the decode leg is sent
    OPENED = auto()  # pull: the same, and the stream begins with what that answer has
    NEXT_DECODE = auto()  # another decode engine gets the same leg: the first got nothing of it
    RETRY = auto()  # a leg has failed: both are sent again under a new id
    FIRST_EVENT = auto()  # of a stream
    RESUME = auto()  # a stream broke off: another decode engine goes on with it
    TAKE_OVER = auto()  # a stream was cut by a feature: other engines go on with it
    END = auto()  # answered, failed, refused, left by its client or cut off by a shutdown


_STATE = RequestState
_EVENT = RequestEvent
TRANSITIONS: Final[Mapping[RequestState, Mapping[RequestEvent, RequestState]]] = {
    _STATE.RECEIVED: {
        _EVENT.QUEUED: _STATE.WAITING,
        _EVENT.ADMITTED: _STATE.ROUTING,
        _EVENT.END: _STATE.OVER,
    },
    _STATE.WAITING: {_EVENT.ADMITTED: _STATE.ROUTING, _EVENT.END: _STATE.OVER},
    _STATE.ROUTING: {
        _EVENT.PULL: _STATE.PREFILLING,
        _EVENT.PUSH: _STATE.BOTH,
        _EVENT.SINGLE: _STATE.DECODING,
        _EVENT.END: _STATE.OVER,
    },
    _STATE.PREFILLING: {
        _EVENT.PREFILLED: _STATE.DECODING,
        _EVENT.OPENED: _STATE.CONTINUING,
        _EVENT.RETRY: _STATE.ROUTING,
        _EVENT.END: _STATE.OVER,
    },
    _STATE.BOTH: {
        _EVENT.NEXT_DECODE: _STATE.BOTH,
        _EVENT.FIRST_EVENT: _STATE.STREAMING,
        _EVENT.RETRY: _STATE.ROUTING,
        _EVENT.END: _STATE.OVER,
    },
    _STATE.DECODING: {
        _EVENT.NEXT_DECODE: _STATE.DECODING,
        _EVENT.FIRST_EVENT: _STATE.STREAMING,
        _EVENT.RETRY: _STATE.ROUTING,
        _EVENT.END: _STATE.OVER,
    },
    _STATE.CONTINUING: {
        _EVENT.NEXT_DECODE: _STATE.CONTINUING,
        _EVENT.FIRST_EVENT: _STATE.STREAMING,
        _EVENT.RESUME: _STATE.ROUTING,
        _EVENT.END: _STATE.OVER,
    },
    _STATE.STREAMING: {
        _EVENT.RESUME: _STATE.ROUTING,
        _EVENT.TAKE_OVER: _STATE.ROUTING,
        _EVENT.END: _STATE.OVER,
    },
    _STATE.OVER: {},
}
