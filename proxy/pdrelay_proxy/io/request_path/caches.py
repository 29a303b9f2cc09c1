"""What engines have in their prefix caches: by their own events, and by what was sent to them.

A prompt of token ids is looked up in the index of their events. Of a text or a chat the token ids of an earlier prompt
may be known, with which it begins: events then say whether that much is there, and what was sent says the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.fleet.cache_index import CacheIndex
from pdrelay_proxy.core.fleet.registry import Member, Registry
from pdrelay_proxy.core.found_matches import FoundMatches
from pdrelay_proxy.core.known_prompts import HeldBeginning, KnownPrefix, KnownPrompts
from pdrelay_proxy.core.model import Instance, InstanceId, Role, RoutingHints
from pdrelay_proxy.core.routing.prompt_memory import PromptMemory
from pdrelay_proxy.core.token_blocks import TokenPrompt

_ON_ITS_WAY_S: Final = 5.0  # for so long a prompt that was sent counts before the engine's events tell of it
_SAME_S: Final = 0.1  # for so long the passing of time changes nothing that matters
_TOKEN_BYTES: Final = 4.0  # bytes of a prompt's JSON that a token is taken to have, at least
_SLACK: Final = 1.25  # what follows a prompt may have so many times its bytes for each token


class CacheSource(FastStrEnum):
    """How it is known what an engine has of a prompt."""

    EVENTS = "events"  # of all of it
    EVENTS_AND_SENT = "events_and_sent"  # of its beginning; the rest by what was sent
    SENT = "sent"  # by what was sent alone


# Looking a member up takes as long as a call.
_EVENTS: Final = CacheSource.EVENTS
_BOTH: Final = CacheSource.EVENTS_AND_SENT
_SENT: Final = CacheSource.SENT


class Caches:
    """What engines have in their prefix caches, for policies and the relay."""

    def __init__(
        self,
        memory: PromptMemory,
        registry: Registry,
        clock: Callable[[], float],
        index: CacheIndex | None = None,
        known: KnownPrompts | None = None,
    ) -> None:
        self._memory = memory
        self._index = index  # None: no engine is asked what it has
        self._known = known  # the tokens of texts; None: likewise
        self._registry = registry
        self._clock = clock  # seconds; the one of the fleet

    def matched(self, instance: Instance, ask: RoutingHints, /, *, is_there: bool = False) -> int:
        """Return how many bytes of the prompt an engine has; ``is_there``: what is on its way does not count."""
        return self.matches((instance,), ask, is_there=is_there)[0]

    def matches(self, among: Sequence[Instance], ask: RoutingHints, /, *, is_there: bool = False) -> list[int]:
        """Return the same for each of some engines. It is looked up once, while a request's engines are chosen."""
        found = self._recent(ask)
        known = found.there if is_there else found.coming
        sizes: list[int] = []  # ``list[int]()`` takes ten times as long
        for instance in among:
            size = known.get(instance.id)
            if size is None:
                size = known[instance.id] = self._found(instance, ask, found, is_there=is_there)[0]
            sizes.append(size)
        return sizes

    def _recent(self, ask: RoutingHints) -> FoundMatches:
        """Return what was found for a request a moment ago, if nothing has changed since."""
        found, now = ask.found, self._clock()
        told, engines = self._memory.changes, self._registry.changes.count
        events = 0 if self._index is None else self._index.changes
        if (
            found is None
            or found.told != told
            or found.events != events
            or found.engines != engines
            or now > found.at + _SAME_S
        ):
            prompt: TokenPrompt | None = None
            known: KnownPrefix | None = None
            if self._index is not None:
                prompt = ask.token_prompt
                known = self._prefix(ask) if prompt is None else None
            found = ask.found = FoundMatches(now, told, events, engines, ask.blocks, prompt, known)
        return found

    def _found(
        self, instance: Instance, ask: RoutingHints, found: FoundMatches, *, is_there: bool
    ) -> tuple[int, CacheSource]:
        """Return how many bytes of the prompt an engine has, and how it is known."""
        member = self._registry.get(instance.id)
        if member is None:
            return 0, _SENT
        since, now = member.life.cache_since, found.at
        size, source = None, _SENT
        if found.prompt is not None:
            size, source = self._ids(member, ask, found, found.prompt), _EVENTS
        elif found.known is not None:
            size, source = self._by_events(instance, ask, found, found.known, since=since, is_there=is_there)
        if size is None:
            return self._memory.matched(instance.id, found.blocks, since=since, now=now, is_there=is_there), _SENT
        if is_there:
            return size, source
        if now - _ON_ITS_WAY_S > since:  # noqa: PLR1730 (a call of ``max`` takes as long as a lookup)
            since = now - _ON_ITS_WAY_S
        sent = self._memory.on_its_way(instance.id, found.blocks, since=since, now=now)
        return sent if sent > size else size, source

    def _ids(self, member: Member, ask: RoutingHints, found: FoundMatches, prompt: TokenPrompt) -> int | None:
        """Return how many bytes of a prompt of token ids an engine has by its events; None: they are not known.

        It is looked up once, for what is there and for what is coming.
        """
        name, adapters = member.instance.id, member.facts.adapters
        if self._index is None or adapters is None:  # until its first probe
            return None
        if name in found.told_tokens:
            tokens = found.told_tokens[name]
        else:
            adapter = ask.model if ask.model in adapters else None
            tokens = found.told_tokens[name] = self._index.cached(name, prompt, adapter)
        return None if tokens is None else len(ask.prompt) * tokens // prompt.count

    def _tokens(self, instance: Instance, ask: RoutingHints, found: FoundMatches) -> int | None:
        """Return how many tokens of the prompt an engine has by its own events, looked up once."""
        if instance.id not in found.told_tokens:
            found.told_tokens[instance.id] = self.tokens(instance, ask)
        return found.told_tokens[instance.id]

    def tokens(self, instance: Instance, ask: RoutingHints) -> int | None:
        """Return how many tokens of the prompt an engine has by its own events; None: it or they are not known.

        Of a text these are tokens of the beginning that is known; it may have more behind them.
        """
        if self._index is None:
            return None
        member, prompt = self._registry.get(instance.id), ask.token_prompt
        if member is None or member.facts.adapters is None:  # until its first probe
            return None
        adapter = ask.model if ask.model in member.facts.adapters else None
        if prompt is not None:
            return self._index.cached(instance.id, prompt, adapter)
        known = self._prefix(ask)
        if known is None:
            return None
        if known.is_all:
            return self._index.cached(instance.id, known.tokens, adapter)
        held = self._held(instance, known, adapter)
        return None if held is None else held.tokens

    def tokens_by_engine(self, ask: RoutingHints, /) -> Mapping[InstanceId, int]:
        """Return the same by engine, of those of which it is known."""
        known = [instance for role in Role for instance in self._registry.known(role)]
        counts = {one.id: self.tokens(one, ask) for one in known}
        return {name: count for name, count in counts.items() if count is not None}

    def sources_by_engine(self, ask: RoutingHints, /) -> Mapping[InstanceId, CacheSource]:
        """Return how it is known what each engine has."""
        known = [instance for role in Role for instance in self._registry.known(role)]
        found = self._recent(ask)
        return {one.id: self._found(one, ask, found, is_there=one.role is Role.DECODE)[1] for one in known}

    def _prefix(self, ask: RoutingHints) -> KnownPrefix | None:
        known = self._known
        return None if known is None or not ask.prompt else ask.known_prefix(known, now=self._clock())

    def _held(self, instance: Instance, known: KnownPrefix, adapter: str | None) -> HeldBeginning | None:
        """Return what an engine has of a text's known beginning, looked up once for each request."""
        if self._index is None:
            return None
        if instance.id not in known.held:
            known.held[instance.id] = self._index.beginning(instance.id, known.tokens, known.count, adapter)
        return known.held[instance.id]

    def _by_events(
        self,
        instance: Instance,
        ask: RoutingHints,
        found: FoundMatches,
        known: KnownPrefix,
        *,
        since: float,
        is_there: bool,
    ) -> tuple[int | None, CacheSource]:
        """Return how many bytes of a text an engine has by its events; None: by what was sent alone.

        Of a longer text than is known, the events decide about its beginning. If all of that is there, what was sent
        says how far it goes on, but no further than there are blocks behind it.
        """
        tokens = self._tokens(instance, ask, found)
        if tokens is None:
            return None, _SENT
        if known.is_all:
            return known.size * tokens // known.tokens.count, _EVENTS
        held = known.held.get(instance.id)
        if held is None:
            return None, _SENT
        if not held.is_whole:
            return known.size * tokens // known.count, _EVENTS
        sent = self._memory.matched(instance.id, found.blocks, since=since, now=found.at, is_there=is_there)
        if not known.has_media:
            behind = held.beyond + known.count - held.tokens
            sent = min(sent, known.size + int(behind * max(_TOKEN_BYTES, _SLACK * known.byte_share)))
        return max(known.size, sent), _BOTH

    def by_engine(self, ask: RoutingHints, /) -> Mapping[InstanceId, int]:
        """Return how many bytes of the prompt each engine has, of those that have some."""
        known = [instance for role in Role for instance in self._registry.known(role)]
        cached = {one.id: self.matched(one, ask, is_there=one.role is Role.DECODE) for one in known}
        return {name: size for name, size in cached.items() if size}

    def sent(self, instance: Instance, ask: RoutingHints, /) -> None:
        """The request goes to an engine."""
        if (member := self._registry.get(instance.id)) is not None:
            now, found, memory = self._clock(), ask.found, self._memory
            if found is not None and found.told != memory.changes:
                found = None  # it is out of date
            memory.sent(instance.id, ask.blocks, since=member.life.cache_since, now=now)
            if found is not None:  # what other engines have is as it was
                found.told = memory.changes
                found.there.pop(instance.id, None)
                found.coming.pop(instance.id, None)
            if self._known is not None:
                known = self._prefix(ask) if found is None else found.known
                if known is not None:
                    self._known.used(known, now=now)

    def arrived(self, instance: Instance, ask: RoutingHints) -> None:
        """A prefill engine has answered: it has the prompt, and its events tell for how long."""
        if ask.prompt and self._registry.get(instance.id) is not None:
            self._memory.arrived(instance.id, ask.blocks, now=self._clock())

    def answered(self, instance: Instance, ask: RoutingHints, answer: int) -> None:
        """A decode engine has answered with so many bytes."""
        if self._registry.get(instance.id) is not None:
            self._memory.answered(instance.id, ask.blocks, answer, now=self._clock())

    def forget(self, instance: Instance, ask: RoutingHints, share: float) -> None:
        """An engine has no more than this share of the prompt."""
        self._memory.forget(instance.id, ask.blocks, int(share * ask.blocks.size))
