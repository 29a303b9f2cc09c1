"""Which routers of a fleet probe which engines, and which engines have failed a probe.

Each engine has ``WATCHERS`` routers that probe it in each interval; the others do so once a minute,
and at once when a watcher reports a failed probe, or that the engine answers again. So an engine
gets few probes, however many routers there are, and each router still judges by its own probes.

Every second each router names the engines that it watches, and which of these are missing. It
watches an engine while fewer than ``WATCHERS`` others that name it are nearer to it, on a ring of
all names (consistent hashing: few watchers change when a router comes or goes). The nearest routers
that know an engine never see so many, so they always watch it: routers that do not know it, for
they have another discovery or have just started, take no place from them. The others wait a while
before they believe that watchers are missing, because all would step in at once.

What is not repeated for three seconds counts no more. The body of a datagram is (engine 8, what of
it 1) * n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from pdrelay_proxy.core.fleet.probe_schedule import keeps_blocks
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.features.peers.core.datagrams import (
    DatagramFault,
    DatagramKind,
    Opened,
    bodies_of,
)
from pdrelay_proxy.features.peers.core.load_payload import engine_name
from pdrelay_proxy.features.peers.core.peer_table import PATIENCE_S

WATCHERS: Final = 3  # of an engine: one may end, and one may be cut off from it
_ENTRY: Final = Struct(">8sB")
# in xpP1 each entry but 0 was a miss, and the others were not named
PROBES: Final = DatagramKind(b"xpP2", _ENTRY.size)
_ANSWERS_AGAIN: Final = 0  # said once
_MISSING: Final = 1
_WATCHED: Final = 2  # it answers, as far as this router has probed it
_MOST_ENGINES: Final = 16_384  # that one peer may name as missing
# for so long an engine has too few watchers before another router watches it: two repeats
_SHORT_S: Final = 2.0


@dataclass(slots=True)
class _Watched:
    """An engine of this router."""

    name: bytes
    # that watch it: when they said so last
    others: dict[bytes, float] = field(default_factory=dict[bytes, float])
    short_since: float | None = None  # fewer than ``WATCHERS`` of them are nearer to it
    is_ours: bool = False

    def choose(self, me: bytes, *, now: float) -> None:
        """Decide whether this router watches it."""
        mine = me < self.name, me  # the ring begins at the engine
        nearer = 0
        late = list[bytes]()
        for router, at in self.others.items():
            if now > at + PATIENCE_S:
                late.append(router)
            elif (router < self.name, router) < mine:
                nearer += 1
        for router in late:
            del self.others[router]
        if nearer >= WATCHERS:
            self.short_since = None
        elif self.short_since is None:
            self.short_since = now
        self.is_ours = self.short_since is not None and now >= self.short_since + _SHORT_S


class ProbePayload:
    """One router's side. ``now`` is seconds of a clock that only rises."""

    def __init__(self, registry: Registry, me: bytes, *, probes: bool = True) -> None:
        """``me``: the name of this router; ``probes``: it probes engines."""
        self._registry = registry
        self._me = me
        self._probes = probes
        self._on_news: Callable[[], None] | None = None  # None: nothing is sent
        self._news: dict[InstanceId, bool] = {}  # by engine: it is missing now
        # by router: its missing engines, and when it said so last
        self._missing: dict[bytes, dict[bytes, float]] = {}
        self._engines: dict[InstanceId, _Watched] = {}
        self._by_name: dict[bytes, _Watched] = {}  # the same
        # by engine: since when some router names it as missing
        self._missed_at: dict[bytes, float] = {}

    def call_on_news(self, call: Callable[[], None]) -> None:
        """Have this called when there is news for the others, by the sender of ``news``: it is
        built with this.
        """
        self._on_news = call

    def watches(self, name: InstanceId) -> bool:
        """Tell whether this router probes an engine in each interval."""
        if len(self._missing) < WATCHERS:
            return True
        engine = self._engines.get(name)
        return engine is not None and engine.is_ours

    def missed_at(self, name: InstanceId) -> float | None:
        """Return since when another router has said that an engine does not answer it; None: none
        says so.
        """
        return self._missed_at.get(self._engine(name).name) if self._missed_at else None

    def is_second_miss(self, name: InstanceId, *, begun: float) -> bool:
        """Return whether a failed probe counts as a second failure, because another router reported
        the first.

        ``begun``: when the probe began. Two that watch an engine may miss it in the same moment,
            which is one failure.
        """
        missed_at = self.missed_at(name)
        return missed_at is not None and (missed_at <= begun or not self.watches(name))

    def note(self, name: InstanceId, *, is_missing: bool) -> None:
        """An engine has failed a probe that answered before, or answers again."""
        if self._missing and self.watches(name):
            self._news[name] = is_missing
            if self._on_news is not None:
                self._on_news()

    def news(self) -> Sequence[bytes]:
        """Return what has changed since the others were told."""
        news = self._news
        self._news = {}
        return bodies_of(
            [
                _ENTRY.pack(self._engine(name).name, _MISSING if is_missing else _ANSWERS_AGAIN)
                for name, is_missing in news.items()
            ]
        )

    def bodies(self) -> Sequence[bytes]:
        """Return what the others are told every second, after ``expire``: the engines that this
        router watches.

        While it hears so few that all probe all, they need to know of those that are missing only.
        """
        names_all = self._probes and len(self._missing) >= WATCHERS
        entries = [
            _ENTRY.pack(
                self._engine(member.instance.id).name, _MISSING if member.life.misses else _WATCHED
            )
            for member in self._registry.members()
            if (member.life.misses or (names_all and not keeps_blocks(member)))
            and self.watches(member.instance.id)
        ]
        return bodies_of(entries) or [b""]

    def receive(self, heard: Opened, /, *, now: float) -> DatagramFault | None:
        """Take in what another router says of engines; return why some of it was dropped, or
        None.
        """
        router = heard.router
        missing = self._missing.setdefault(router, {})
        for engine, state in _ENTRY.iter_unpack(heard.body):
            if (known := self._by_name.get(engine)) is not None:
                known.others[router] = now
            if state == _WATCHED:
                continue
            if state == _MISSING:
                if engine not in missing and len(missing) >= _MOST_ENGINES:
                    return DatagramFault.TOO_MANY
                missing[engine] = now
                self._missed_at.setdefault(engine, now)
            elif state == _ANSWERS_AGAIN:  # routers that still miss it say so again
                self._missed_at.pop(engine, None)
                for engines in self._missing.values():
                    engines.pop(engine, None)
            else:
                return DatagramFault.MALFORMED
        return None

    def expire(
        self,
        departed: Sequence[bytes],
        forgotten: Sequence[bytes],  # noqa: ARG002
        /,
        *,
        now: float,
    ) -> None:
        """Drop what was not repeated; decide which engines this router watches."""
        for router in departed:
            for engine in self._missing.pop(router, {}):
                self._drop_missing(engine)
        for missing in self._missing.values():
            for engine in [engine for engine, at in missing.items() if now > at + PATIENCE_S]:
                del missing[engine]
                self._drop_missing(engine)
        self._engines = {
            member.instance.id: self._engine(member.instance.id)
            for member in self._registry.members()
        }
        self._by_name = {engine.name: engine for engine in self._engines.values()}
        for watched in self._engines.values():
            watched.choose(self._me, now=now)

    def _drop_missing(self, engine: bytes) -> None:
        """One router names an engine as missing no more."""
        if not any(engine in missing for missing in self._missing.values()):
            self._missed_at.pop(engine, None)

    def _engine(self, name: InstanceId) -> _Watched:
        engine = self._engines.get(name)
        if engine is None:
            member = self._registry.get(name)
            engine = _Watched(b"" if member is None else engine_name(member))
            self._engines[name] = engine
        return engine
