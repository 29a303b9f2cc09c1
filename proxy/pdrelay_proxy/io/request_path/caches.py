"""What engines have in their prefix caches: by what was sent to them, and by what they tell
themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, Role, RoutingHints
from pdrelay_proxy.core.prompt_blocks import PromptBlocks
from pdrelay_proxy.core.routing.cache_reports import CacheReports, PromptReports
from pdrelay_proxy.core.routing.prompt_memory import PromptMemory

SENT: Final = "sent"  # it is known by what was sent alone
# for so long a prompt that was sent counts before the engine tells of it
_ON_ITS_WAY_S: Final = 5.0
_SAME_S: Final = 0.1  # for so long the passing of time changes nothing that matters


class _Matches:
    """What was found of one prompt, for as long as caches, engines and time are nearly the same."""

    __slots__ = ("at", "blocks", "changes", "coming", "model", "reports", "there")

    def __init__(
        self,
        at: float,
        changes: int,
        blocks: PromptBlocks,
        model: str | None,
        reports: PromptReports | None,
    ) -> None:
        self.at = at  # seconds
        # of what was sent, of engines and of their reports, added up: each can only grow
        self.changes = changes
        self.blocks = blocks
        self.model = model
        self.reports = reports  # None: what was sent decides
        self.there: dict[str, int] = {}  # bytes by instance
        self.coming: dict[str, int] = {}  # likewise, with what is on its way


class Caches:
    """What engines have in their prefix caches, for policies and the relay."""

    def __init__(
        self,
        memory: PromptMemory,
        registry: Registry,
        clock: Callable[[], float],
        reports: CacheReports | None = None,
    ) -> None:
        self._memory = memory
        self._reports = reports  # None: no engine is heard
        self._registry = registry
        self._clock = clock  # seconds; the one of the fleet
        self._latest: _Matches | None = None  # of the prompt whose engines are chosen

    def matched(self, instance: Instance, hints: RoutingHints, /, *, is_there: bool = False) -> int:
        """Return how many bytes of the prompt it has; ``is_there``: none that are on their way."""
        return self.matches((instance,), hints, is_there=is_there)[0]

    def matches(
        self, among: Sequence[Instance], hints: RoutingHints, /, *, is_there: bool = False
    ) -> list[int]:
        """Return the same for each of some engines.

        It is looked up once, while a request's engines are chosen.
        """
        matches = self._recent(hints)
        known = matches.there if is_there else matches.coming
        sizes: list[int] = []  # ``list[int]()`` takes ten times as long
        for instance in among:
            size = known.get(instance.id)
            if size is None:
                size = known[instance.id] = self._size_and_source(
                    instance, matches, is_there=is_there
                )[0]
            sizes.append(size)
        return sizes

    def _recent(self, hints: RoutingHints) -> _Matches:
        """Return what was found of this prompt a moment ago, if nothing has changed since."""
        matches = self._latest
        now = self._clock()
        changes = self._memory.changes + self._registry.changes.count
        if self._reports is not None:
            changes += self._reports.changes.count
        blocks = hints.blocks
        if (
            matches is None
            or matches.blocks is not blocks
            or matches.changes != changes
            or matches.model != hints.model
            or now > matches.at + _SAME_S
        ):
            reports = None if self._reports is None else self._reports.of(hints)
            matches = self._latest = _Matches(now, changes, blocks, hints.model, reports)
        return matches

    def _size_and_source(
        self, instance: Instance, matches: _Matches, *, is_there: bool
    ) -> tuple[int, str]:
        """Return how many bytes of the prompt an engine has, and how it is known."""
        member = self._registry.get(instance.id)
        if member is None:
            return 0, SENT
        memory = self._memory
        since = member.life.cache_since
        now = matches.at
        report = None if matches.reports is None else matches.reports.report(member)
        if report is None:
            return memory.matched(
                instance.id, matches.blocks, since=since, now=now, is_there=is_there
            ), SENT
        size, most, source = report
        if most > size:
            sent = memory.matched(
                instance.id, matches.blocks, since=since, now=now, is_there=is_there
            )
            size = max(size, min(sent, most))
        if is_there:
            return size, source
        if now - _ON_ITS_WAY_S > since:  # noqa: PLR1730 (a call of ``max`` takes as long as a lookup)
            since = now - _ON_ITS_WAY_S
        coming = memory.on_its_way(instance.id, matches.blocks, since=since, now=now)
        return coming if coming > size else size, source

    def tokens_by_engine(self, hints: RoutingHints, /) -> Mapping[InstanceId, int]:
        """Return how many tokens of the prompt engines have, by their own reports."""
        reports = self._recent(hints).reports
        if reports is None:
            return {}
        counts = {member.instance.id: reports.tokens(member) for member in self._registry.members()}
        return {name: count for name, count in counts.items() if count is not None}

    def sources_by_engine(self, hints: RoutingHints, /) -> Mapping[InstanceId, str]:
        """Return how it is known what each engine has."""
        known = [instance for role in Role for instance in self._registry.known(role)]
        matches = self._recent(hints)
        return {
            engine.id: self._size_and_source(engine, matches, is_there=engine.role is Role.DECODE)[
                1
            ]
            for engine in known
        }

    def by_engine(self, hints: RoutingHints, /) -> Mapping[InstanceId, int]:
        """Return how many bytes of the prompt each engine has, of those that have some."""
        known = [instance for role in Role for instance in self._registry.known(role)]
        cached = {
            engine.id: self.matched(engine, hints, is_there=engine.role is Role.DECODE)
            for engine in known
        }
        return {name: size for name, size in cached.items() if size}

    def sent(self, instance: Instance, hints: RoutingHints, /) -> None:
        """The request goes to an engine."""
        member = self._registry.get(instance.id)
        if member is None:
            return
        blocks = hints.blocks
        now = self._clock()
        memory = self._memory
        matches = self._latest
        if matches is not None and matches.blocks is not blocks:
            matches = None
        before = memory.changes
        memory.sent(instance.id, blocks, since=member.life.cache_since, now=now)
        if matches is not None:  # what other engines have is as it was
            matches.changes += memory.changes - before
            matches.there.pop(instance.id, None)
            matches.coming.pop(instance.id, None)
        if self._reports is not None:
            reports = self._reports.of(hints) if matches is None else matches.reports
            if reports is not None:
                reports.sent(now)

    def arrived(self, instance: Instance, hints: RoutingHints) -> None:
        """A prefill engine has answered: it has the prompt."""
        if hints.prompt and self._registry.get(instance.id) is not None:
            self._memory.arrived(instance.id, hints.blocks, now=self._clock())

    def answered(self, instance: Instance, hints: RoutingHints, answer: int) -> None:
        """A decode engine has answered with so many bytes."""
        if self._registry.get(instance.id) is not None:
            self._memory.answered(instance.id, hints.blocks, answer, now=self._clock())

    def forget(self, instance: Instance, hints: RoutingHints, share: float) -> None:
        """An engine has no more than this share of the prompt."""
        self._memory.forget(instance.id, hints.blocks, int(share * hints.blocks.size))
