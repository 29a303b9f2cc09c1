"""The events of requests in this engine, for ``GET /v1/pdrelay/requests/NAME`` (docs/why.md)."""

import re
from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum, auto
from typing import Final

import msgspec

MAX_EVENTS: Final = 4096  # that wait for the next step of the engine; the oldest are dropped


class TimelineStep(StrEnum):
    """What happened. Each is the end of what was before it."""

    ARRIVED = auto()  # at the API server
    QUEUED = auto()  # the scheduler knows it
    CONSIDERED = auto()  # its turn has come for the first time; count: tokens in the prefix cache
    LOAD_ORDERED = auto()  # it has blocks, and their KV is to be loaded; count: tokens
    LOAD_BEGUN = auto()  # the worker has the order
    PEER_MET = auto()  # the handshake is over
    STAGING = auto()  # a part is being copied into P's host memory; count: blocks
    READING = auto()  # a part is being read; count: blocks
    READ = auto()  # all parts are here, and P is asked whether the lease held
    LOADED = auto()  # P has confirmed, or all was pushed
    LOAD_FAILED = auto()
    WRITING = auto()  # push: a part is being written; count: tokens up to its end
    WRITTEN = auto()  # push: all of it
    COMPUTING = auto()  # a step has begun that computes some of its prompt; count: tokens
    FIRST_TOKEN = auto()
    FINISHED = auto()  # count: tokens of its answer
    LEASE_GRANTED = auto()
    LEASE_RENEWED = auto()
    LEASE_DONE = auto()  # the decode engine has read all blocks
    LEASE_DROPPED = auto()
    LEASE_PEER_LOST = auto()
    LEASE_EXPIRED = auto()
    LEASE_REVOKED = auto()


class TimelineEvent(msgspec.Struct, frozen=True, array_like=True):
    """One event; ``request`` is vLLM's own id, or in push the name of the transfer."""

    request: str
    step: TimelineStep
    at: float  # s; monotonic where it happens, since the epoch once it is reported
    count: int = 0
    note: str = ""  # of a load that failed: how, as vllm:pdrelay_peer_loads names it


def shifted(events: Iterable[TimelineEvent], by: float) -> list[TimelineEvent]:
    """Return the events on another clock, which shows ``by`` seconds more."""
    return [
        TimelineEvent(event.request, event.step, event.at + by, event.count, event.note)
        for event in events
    ]


class TimelineStore:
    """The events of the latest requests, in an API server process.

    It is bounded in requests and in events of one.
    """

    def __init__(self, *, requests: int = 4096, events: int = 256) -> None:
        self._most = requests
        self._most_events = events
        self._events: OrderedDict[str, list[tuple[int, TimelineEvent]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._events)

    def add(self, engine: int, events: Iterable[TimelineEvent]) -> None:
        """Keep events of an engine: an API server may have several data-parallel ranks."""
        for event in events:
            entries = self._events.get(event.request)
            if entries is None:
                entries = self._events[event.request] = []
                if len(self._events) > self._most:
                    self._events.popitem(last=False)
            if len(entries) == self._most_events:  # of many parts those in the middle say least
                del entries[self._most_events // 2]
            entries.append((engine, event))

    def find(self, name: str) -> dict[str, list[tuple[int, TimelineEvent]]]:
        """Return the events of requests with this name, in order, by the engine's ids.

        The engine's id is the ``X-Request-Id`` with a prefix, the number of the prompt, and eight
        random digits (``entrypoints/openai`` and ``v1/engine/input_processor.py`` of vLLM). In push
        the name may be a transfer's.
        """
        ends = re.compile(rf"(?:^|-){re.escape(name)}(?:-\d+)?(?:-[0-9a-f]{{8}})?$")
        matches = {
            key: entries
            for key, entries in self._events.items()
            if name in key and ends.search(key)
        }
        return {
            key: sorted(entries, key=lambda entry: entry[1].at) for key, entries in matches.items()
        }
