"""Which engines there should be: the union of several sources.

A source always sends whole views, so a lost message costs time but never keeps an engine that is
gone. A source's latest view holds until its next: one that cannot be reached removes nothing.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.target import EngineSource, Key, Origin, Wanted
from pdrelay_proxy.core.steps import portions

# engines of one source; more are left out, and logged, until others have gone
MAX_ENGINES: Final = 50_000
# engines compared with the old view in one step: some tenths of a millisecond
_READ_AT_ONCE: Final = 200
# changed addresses applied in one step: the changes that follow take 20 times as long
_APPLIED_AT_ONCE: Final = 20


@dataclass(frozen=True, slots=True)
class View:
    """The latest view of a source. Times are seconds of a monotonic clock."""

    engines: Mapping[Key, Wanted] = field(default_factory=dict[Key, Wanted])
    generation: int = 0  # counts changes; 0: never heard
    heard_at: float = 0.0  # when the view was last confirmed
    is_synced: bool = False  # a whole view has been received
    # beyond the limit; the first is next when there is room
    left_out: Mapping[Key, Wanted] = field(default_factory=dict[Key, Wanted])


@dataclass(frozen=True, slots=True)
class Freshness:
    """How recent the view of a source is."""

    source: EngineSource
    is_synced: bool
    age_s: float  # since its view was last confirmed
    generation: int
    engines: int


class Sources:
    """The views of all sources of this router."""

    def __init__(
        self, names: Iterable[EngineSource], *, now: float, max_engines: int = MAX_ENGINES
    ) -> None:
        self._max_engines = max_engines  # engines of one source
        self.views = {
            name: View(heard_at=now) for name in sorted(names, key=tuple(EngineSource).index)
        }

    def replace_in_steps(
        self, source: EngineSource, engines: Iterable[Wanted], *, now: float
    ) -> Generator[Sequence[Key]]:
        """Replace the view of a source in steps of about a millisecond, and yield the addresses
        that differ with each.

        Addresses that lost their engine come first, which makes room. After the last step the
        source counts as received; all steps are of one generation.
        """
        old = self.views[source]
        engines_by_key = yield from _by_key(engines)
        left_out = dict[Key, Wanted]()
        if len(engines_by_key) > self._max_engines:  # present engines stay
            order = sorted(
                engines_by_key, key=lambda key: (key not in old.engines, engines_by_key[key].leaves)
            )
            left_out = {key: engines_by_key.pop(key) for key in order[self._max_engines :]}
        gone = [key for key in old.engines if key not in engines_by_key]
        differing = list[Key]()
        generation = old.generation + 1
        for number, (key, wanted) in enumerate(engines_by_key.items(), start=1):
            before = old.engines.get(key)
            if before is not wanted and before != wanted:
                differing.append(key)
            if number % _READ_AT_ONCE == 0:
                yield ()
        applied = dict[Key, Wanted]()
        for keys in (gone, differing):
            for step_keys in portions(keys, _APPLIED_AT_ONCE):
                # the first step, or a step after ``change``
                if self.views[source].engines is not applied:
                    applied = dict(self.views[source].engines)
                for key in step_keys:
                    if key in engines_by_key:
                        applied[key] = engines_by_key[key]
                    else:
                        applied.pop(key, None)
                self.views[source] = replace(
                    self.views[source], engines=applied, generation=generation
                )
                yield step_keys
        is_changed = bool(gone or differing) or not old.is_synced
        self.views[source] = View(
            self.views[source].engines,
            generation if is_changed else old.generation,
            now,
            is_synced=True,
            left_out=left_out,
        )

    def change(
        self, source: EngineSource, engines: Mapping[Key, Wanted | None], *, now: float
    ) -> Sequence[Key]:
        """Change a view at some addresses (None: the engine is gone); return those that differ.

        Engines beyond the limit are left out until there is room.
        """
        old = self.views[source]
        engines_by_key = dict(old.engines)
        left_out = dict(old.left_out)
        changed = list[Key]()
        for key, wanted in engines.items():
            left_out.pop(key, None)
            if wanted == engines_by_key.get(key):
                continue
            if wanted is None:
                del engines_by_key[key]
            elif key not in engines_by_key and len(engines_by_key) >= self._max_engines:
                left_out[key] = wanted
                continue
            else:
                engines_by_key[key] = wanted
            changed.append(key)
        while left_out and len(engines_by_key) < self._max_engines:
            key = next(iter(left_out))
            engines_by_key[key] = left_out.pop(key)
            changed.append(key)
        new = replace(old, heard_at=now, left_out=left_out)
        if changed:
            new = replace(new, engines=engines_by_key, generation=old.generation + 1)
        self.views[source] = new
        return changed

    def heard(self, source: EngineSource, *, now: float) -> None:
        """Note that the latest view of a source is still right."""
        self.views[source] = replace(self.views[source], heard_at=now)

    def freshness(self, *, now: float) -> Sequence[Freshness]:
        """Return for each source how recent its view is."""
        return [
            Freshness(
                name,
                view.is_synced,
                max(0.0, now - view.heard_at),
                view.generation,
                len(view.engines),
            )
            for name, view in self.views.items()
        ]

    @property
    def missing(self) -> Sequence[EngineSource]:
        """The sources that have not been received yet."""
        return [name for name, view in self.views.items() if not view.is_synced]

    def desired_at(self, keys: Iterable[Key]) -> Mapping[Key, Origin]:
        """Return the union of all views at some addresses; an engine leaves if any says so."""
        origins: dict[Key, Origin] = {}
        for source, view in self.views.items():
            for key in keys:
                if (wanted := view.engines.get(key)) is None:
                    continue
                if (first := origins.get(key)) is None:
                    origins[key] = Origin(source, view.generation, wanted)
                elif wanted.leaves and first.wanted is not None:
                    moves = wanted.moves or first.wanted.moves
                    origins[key] = replace(
                        first, wanted=replace(first.wanted, leaves=True, moves=moves)
                    )
        return origins


def _by_key(engines: Iterable[Wanted]) -> Generator[Sequence[Key], None, dict[Key, Wanted]]:
    """Index engines by address, in steps: of two, the one that stays, else the later."""
    leaving = dict[Key, Wanted]()
    staying = dict[Key, Wanted]()
    for number, engine in enumerate(engines, start=1):
        (leaving if engine.leaves else staying)[engine.key] = engine
        if number % _READ_AT_ONCE == 0:
            yield ()
    return {**leaving, **staying}


def key_of(member: Member) -> Key:
    """Return the name of an engine at its source."""
    return Key(member.instance.pool, member.instance.address.authority)
