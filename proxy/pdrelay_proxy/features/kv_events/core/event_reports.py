"""What engines have in their prefix caches, by their own events.

A prompt of token ids is looked up in the index. Of a text or a chat the token ids of an earlier prompt may be known,
with which it begins: events then say whether that much is there, and what was sent says the rest.
"""

from collections.abc import Callable
from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId, RoutingHints
from pdrelay_proxy.core.routing.cache_reports import CacheReport, CacheReports
from pdrelay_proxy.features.kv_events.core.cache_index import CacheIndex
from pdrelay_proxy.features.kv_events.core.known_prompts import HeldBeginning, KnownPrefix, KnownPrompts
from pdrelay_proxy.features.kv_events.core.prompt_lookup import PromptLookup, PromptTokens

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

    def __init__(
        self, index: CacheIndex, registry: Registry, clock: Callable[[], float], known: KnownPrompts | None = None
    ) -> None:
        """``known``: the token ids of texts; None: only prompts of token ids are looked up."""
        self._index = index
        self._registry = registry
        self._clock = clock  # seconds; the one of the fleet
        self._known = known
        self._lookup = PromptLookup(known)

    @property
    def changes(self) -> int:
        """What was reported stays true while this is the same."""
        return self._index.changes

    def report(self, engine: Member, hints: RoutingHints, /) -> CacheReport | None:
        """Return what an engine has of a prompt.

        Of a longer text than is known, the events decide about its beginning. If all of that is there, what was sent
        says how far it goes on, but no further than there are blocks behind it.
        """
        prompt = self._lookup.find(hints, self._clock())
        known = prompt.known
        if prompt.ids is None and known is None:
            return None
        tokens = self._cached(engine, hints, prompt)
        if tokens is None:
            return None
        if prompt.ids is not None:
            return _certain(len(hints.prompt) * tokens // prompt.ids.count)
        if known is None:
            return None
        if known.is_all:
            return _certain(known.size * tokens // known.tokens.count)
        held = prompt.held.get(engine.instance.id)
        if held is None:
            return None
        if not held.is_whole:
            return _certain(known.size * tokens // known.count)
        most = _ENDLESS
        if not known.has_media:
            behind = held.beyond + known.count - held.tokens
            most = known.size + int(behind * max(_TOKEN_BYTES, _SLACK * known.byte_share))
        return CacheReport(known.size, most, _BOTH)

    def tokens(self, engine: Member, hints: RoutingHints, /) -> int | None:
        """Return how many tokens of the prompt an engine has by its events; None: it or they are not known.

        Of a text these are tokens of the beginning that is known; it may have more behind them.
        """
        return self._cached(engine, hints, self._lookup.find(hints, self._clock()))

    def sent(self, hints: RoutingHints, /) -> None:
        """A request with this prompt goes to an engine."""
        if self._known is not None:
            now = self._clock()
            known = self._lookup.find(hints, now).known
            if known is not None:
                self._known.used(known, now=now)

    def is_ids(self, hints: RoutingHints) -> bool:
        """Tell whether a prompt is one of token ids."""
        return self._lookup.find(hints, self._clock()).ids is not None

    def _cached(self, engine: Member, hints: RoutingHints, prompt: PromptTokens) -> int | None:
        """Return how many tokens an engine has, looked up once while nothing changes."""
        adapters = engine.facts.adapters
        if adapters is None:  # until its first probe
            return None
        index, engines = self._index, self._registry.changes.count
        if prompt.changes != index.changes or prompt.engines != engines or prompt.model != hints.model:
            prompt.changes = index.changes
            prompt.engines = engines
            prompt.model = hints.model
            prompt.cached.clear()
        name = engine.instance.id
        if name in prompt.cached:
            return prompt.cached[name]
        adapter = hints.model if hints.model in adapters else None
        known = prompt.known
        tokens: int | None = None
        if prompt.ids is not None:
            tokens = index.cached(name, prompt.ids, adapter)
        elif known is not None and known.is_all:
            tokens = index.cached(name, known.tokens, adapter)
        elif known is not None:
            held = self._held(name, known, prompt, adapter)
            tokens = None if held is None else held.tokens
        prompt.cached[name] = tokens
        return tokens

    def _held(self, name: str, known: KnownPrefix, prompt: PromptTokens, adapter: str | None) -> HeldBeginning | None:
        """Return what an engine has of a text's known beginning, looked up once for each request."""
        if name not in prompt.held:
            prompt.held[name] = self._index.beginning(InstanceId(name), known.tokens, known.count, adapter)
        return prompt.held[name]


def _certain(size: int) -> CacheReport:
    return CacheReport(size, size, _EVENTS)
