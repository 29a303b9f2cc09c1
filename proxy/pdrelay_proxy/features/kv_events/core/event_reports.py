"""Reports how much of a prompt engines have cached, by their KV events.

A prompt of token ids is looked up in the index. A text or a chat may begin with an earlier prompt
whose token ids are known: events then report that beginning, and what was sent reports the rest.
"""

from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.model import InstanceId, RoutingHints
from pdrelay_proxy.core.routing.cache_reports import CacheReport, CacheReports, PromptReports
from pdrelay_proxy.features.kv_events.core.cache_index import CacheIndex
from pdrelay_proxy.features.kv_events.core.known_prompts import (
    CachedBeginning,
    KnownPrefix,
    KnownPrompts,
)
from pdrelay_proxy.features.kv_events.core.prompt_lookup import PromptLookup
from pdrelay_proxy.features.kv_events.core.token_blocks import TokenPrompt

_TOKEN_BYTES: Final = 4.0  # bytes of JSON for a token, at least
_SLACK: Final = 1.25  # text behind a prompt may have so many times its bytes for a token
_ENDLESS: Final = 1 << 62


class CacheSource(FastStrEnum):
    """How the cached part of a prompt is known."""

    EVENTS = "events"
    EVENTS_AND_SENT = "events_and_sent"  # its beginning by events, the rest by earlier requests


_EVENTS: Final = CacheSource.EVENTS.value
_BOTH: Final = CacheSource.EVENTS_AND_SENT.value


class EventReports(CacheReports):
    """Looks prompts up in the index of KV events."""

    def __init__(self, index: CacheIndex, lookup: PromptLookup) -> None:
        """``lookup``: of the token ids of prompts."""
        super().__init__(index.changes)
        self._index = index
        self._lookup = lookup

    def of(self, hints: RoutingHints, /) -> PromptReports | None:
        """Return reports for a prompt; None: its token ids are not known."""
        prompt = self._lookup.find(hints)
        prefix = prompt.prefix
        if prompt.ids is not None:
            return _IdsReports(self._index, prompt.ids, prompt.size, hints.model)
        if prefix is None or self._lookup.known_prompts is None:
            return None
        return _TextReports(self._index, prefix, hints.model, self._lookup.known_prompts)


class _IdsReports(PromptReports):
    """Reports for a prompt of token ids."""

    __slots__ = ("_cached", "_ids", "_index", "_model", "_size")

    def __init__(self, index: CacheIndex, ids: TokenPrompt, size: int, model: str | None) -> None:
        self._index = index
        self._ids = ids
        self._size = size  # bytes of the prompt
        self._model = model
        # cached tokens by engine
        self._cached: dict[str, int | None] = {}

    def report(self, engine: Member, /) -> CacheReport | None:
        """Return what an engine has."""
        name = engine.instance.id
        cached = self._cached
        if name in cached:
            tokens = cached[name]
        else:
            adapters = engine.facts.adapters
            if adapters is None:  # until its first probe
                return None
            model = self._model
            tokens = cached[name] = self._index.cached(
                name, self._ids, model if model in adapters else None
            )
        if tokens is None:
            return None
        size = self._size * tokens // self._ids.count
        return size, size, _EVENTS

    def tokens(self, engine: Member, /) -> int | None:
        """Return how many tokens an engine has."""
        self.report(engine)
        return self._cached.get(engine.instance.id)


class _TextReports(PromptReports):
    """Reports for a text or a chat that begins like an earlier one, or equals it."""

    __slots__ = ("_cached", "_index", "_memory", "_model", "_prefix")

    def __init__(
        self, index: CacheIndex, prefix: KnownPrefix, model: str | None, memory: KnownPrompts
    ) -> None:
        self._index = index
        self._prefix = prefix
        self._model = model
        self._memory = memory
        self._cached: dict[str, int | None] = {}  # tokens by engine, as above

    def report(self, engine: Member, /) -> CacheReport | None:
        """Return what an engine has.

        Events decide about the known beginning. If an engine has all of it, earlier requests decide
        how far its cache goes on, but no further than its blocks behind the beginning.
        """
        prefix = self._prefix
        tokens = self.tokens(engine)
        if tokens is None:
            return None
        if prefix.is_all:
            size = prefix.size * tokens // prefix.tokens.count
            return size, size, _EVENTS
        cached = self._prefix.cached.get(engine.instance.id)
        if cached is None:
            return None
        if not cached.is_whole:
            size = prefix.size * tokens // prefix.count
            return size, size, _EVENTS
        most = _ENDLESS
        if not prefix.has_media:
            behind = cached.beyond + prefix.count - cached.tokens
            most = prefix.size + int(behind * max(_TOKEN_BYTES, _SLACK * prefix.byte_share))
        return prefix.size, most, _BOTH

    def tokens(self, engine: Member, /) -> int | None:
        """Return how many tokens of the known beginning an engine has; it may have more behind."""
        name = engine.instance.id
        adapters = engine.facts.adapters
        if name in self._cached or adapters is None:  # until its first probe
            return self._cached.get(name)
        prefix = self._prefix
        adapter = self._model if self._model in adapters else None
        if prefix.is_all:
            tokens = self._index.cached(name, prefix.tokens, adapter)
        else:
            cached = self._beginning(name, adapter)
            tokens = None if cached is None else cached.tokens
        self._cached[name] = tokens
        return tokens

    def sent(self, now: float, /) -> None:
        """Mark the known beginning as used, so that it is not forgotten."""
        self._memory.used(self._prefix, now=now)

    def _beginning(self, name: InstanceId, adapter: str | None) -> CachedBeginning | None:
        """Return how much of the known beginning an engine has, looked up once a request."""
        cached = self._prefix.cached
        if name not in cached:
            cached[name] = self._index.beginning(
                name, self._prefix.tokens, self._prefix.count, adapter
            )
        return cached[name]
