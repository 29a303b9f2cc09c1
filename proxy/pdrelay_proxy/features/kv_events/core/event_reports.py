"""What engines have in their prefix caches, by their own events.

A prompt of token ids is looked up in the index. Of a text or a chat the token ids of an earlier
prompt may be known, with which it begins: events then say whether that much is there, and what was
sent says the rest.
"""

from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.model import InstanceId, RoutingHints
from pdrelay_proxy.core.routing.cache_reports import CacheReport, CacheReports, PromptReports
from pdrelay_proxy.features.kv_events.core.cache_index import CacheIndex
from pdrelay_proxy.features.kv_events.core.known_prompts import (
    HeldBeginning,
    KnownPrefix,
    KnownPrompts,
)
from pdrelay_proxy.features.kv_events.core.prompt_lookup import PromptLookup
from pdrelay_proxy.features.kv_events.core.token_blocks import TokenPrompt

_TOKEN_BYTES: Final = 4.0  # bytes of a prompt's JSON that a token is taken to have, at least
_SLACK: Final = 1.25  # what follows a prompt may have so many times its bytes for each token
_ENDLESS: Final = 1 << 62


class CacheSource(FastStrEnum):
    """How it is known what an engine has of a prompt."""

    EVENTS = "events"  # of all of it
    EVENTS_AND_SENT = "events_and_sent"  # of its beginning; the rest by what was sent


_EVENTS: Final = CacheSource.EVENTS.value
_BOTH: Final = CacheSource.EVENTS_AND_SENT.value


class EventReports(CacheReports):
    """Looks prompts up in the index of what engines have told."""

    def __init__(self, index: CacheIndex, lookup: PromptLookup) -> None:
        """``lookup``: of the token ids of prompts."""
        super().__init__(index.changes)
        self._index = index
        self._lookup = lookup

    def of(self, hints: RoutingHints, /) -> PromptReports | None:
        """Return what engines have of a prompt; None: its token ids are not known."""
        prompt = self._lookup.find(hints)
        known = prompt.known
        if prompt.ids is not None:
            return _IdsReports(self._index, prompt.ids, prompt.size, hints.model)
        if known is None or self._lookup.known is None:
            return None
        return _TextReports(self._index, known, hints.model, self._lookup.known)


class _IdsReports(PromptReports):
    """Of a prompt of token ids."""

    __slots__ = ("_cached", "_ids", "_index", "_model", "_size")

    def __init__(self, index: CacheIndex, ids: TokenPrompt, size: int, model: str | None) -> None:
        self._index = index
        self._ids = ids
        self._size = size  # bytes of the prompt
        self._model = model
        # tokens by engine: for what is there, and what is coming
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
    """Of a text or a chat that begins as an earlier one did, or equals it."""

    __slots__ = ("_cached", "_index", "_known", "_memory", "_model")

    def __init__(
        self, index: CacheIndex, known: KnownPrefix, model: str | None, memory: KnownPrompts
    ) -> None:
        self._index = index
        self._known = known
        self._model = model
        self._memory = memory
        self._cached: dict[str, int | None] = {}  # tokens by engine, as above

    def report(self, engine: Member, /) -> CacheReport | None:
        """Return what an engine has.

        Of a longer text than is known, the events decide about its beginning. If all of that is
        there, what was sent says how far it goes on, but no further than there are blocks behind
        it.
        """
        known = self._known
        tokens = self.tokens(engine)
        if tokens is None:
            return None
        if known.is_all:
            size = known.size * tokens // known.tokens.count
            return size, size, _EVENTS
        held = self._known.held.get(engine.instance.id)
        if held is None:
            return None
        if not held.is_whole:
            size = known.size * tokens // known.count
            return size, size, _EVENTS
        most = _ENDLESS
        if not known.has_media:
            behind = held.beyond + known.count - held.tokens
            most = known.size + int(behind * max(_TOKEN_BYTES, _SLACK * known.byte_share))
        return known.size, most, _BOTH

    def tokens(self, engine: Member, /) -> int | None:
        """Return how many tokens an engine has of what is known; it may have more behind them."""
        name = engine.instance.id
        adapters = engine.facts.adapters
        if name in self._cached or adapters is None:  # until its first probe
            return self._cached.get(name)
        known = self._known
        adapter = self._model if self._model in adapters else None
        if known.is_all:
            tokens = self._index.cached(name, known.tokens, adapter)
        else:
            held = self._held(name, adapter)
            tokens = None if held is None else held.tokens
        self._cached[name] = tokens
        return tokens

    def sent(self, now: float, /) -> None:
        """Keep what is known of it."""
        self._memory.used(self._known, now=now)

    def _held(self, name: InstanceId, adapter: str | None) -> HeldBeginning | None:
        """Return what an engine has of a text's known beginning, looked up once for each
        request.
        """
        held = self._known.held
        if name not in held:
            held[name] = self._index.beginning(name, self._known.tokens, self._known.count, adapter)
        return held[name]
