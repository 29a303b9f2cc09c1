"""Which routers of a fleet probe which engines, and which engines have failed a probe.

Each engine has ``WATCHERS`` routers that probe it in each interval; the others do so once a minute,
and at once when a watcher reports a failed probe, or a first success after one. So an engine gets
few probes, however many routers there are, and each router still decides by its own probes.

Every second each router names the engines that it watches, and which of these are missing. It
watches an engine unless ``WATCHERS`` others that name it are nearer to it on a ring of all names
(consistent hashing: few watchers change when a router comes or goes). So the nearest routers that
know an engine always watch it; a router that does not know it, because it has another discovery or
has just started, takes no place from them. The others wait a while before they step in for missing
watchers, because all would do so at once.

An entry that is not repeated for three seconds expires. The body of a datagram is (engine 8,
state 1) * n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from pdrelay_proxy.core.fleet.probe_schedule import keeps_blocks
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.features.peers.core.datagrams import (
    Datagram,
    DatagramFault,
    DatagramKind,
    bodies_of,
)
from pdrelay_proxy.features.peers.core.load_payload import engine_name
from pdrelay_proxy.features.peers.core.peer_table import PATIENCE_S

WATCHERS: Final = 3  # of an engine: one may end, and another be cut off
_ENTRY: Final = Struct(">8sB")
# in xpP1 each entry but 0 was a miss, and the others were not named
PROBES: Final = DatagramKind(b"xpP2", _ENTRY.size)
_ANSWERS_AGAIN: Final = 0  # said once
_MISSING: Final = 1
_WATCHED: Final = 2  # it answers this router's probes
_MOST_ENGINES: Final = 16_384  # that one peer may name as missing
# seconds of too few watchers after which another router steps in: two repeats
_SHORT_S: Final = 2.0


@dataclass(slots=True)
class _Watched:
    """An engine, and the other routers that watch it."""

    name: bytes
    # by router: when it named the engine last
    watchers: dict[bytes, float] = field(default_factory=dict[bytes, float])
    short_since: float | None = None  # since when fewer than ``WATCHERS`` of them are nearer to it
    is_ours: bool = False

    def choose(self, me: bytes, *, now: float) -> None:
        """Decide whether this router watches the engine."""
        mine = me < self.name, me  # the ring begins at the engine
        nearer = 0
        late = list[bytes]()
        for router, at in self.watchers.items():
            if now > at + PATIENCE_S:
                late.append(router)
            elif (router < self.name, router) < mine:
                nearer += 1
        for router in late:
            del self.watchers[router]
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
        # by router: its missing engines, and when it named them last
        self._missing: dict[bytes, dict[bytes, float]] = {}
        self._engines: dict[InstanceId, _Watched] = {}
        self._by_name: dict[bytes, _Watched] = {}  # the same
        # by engine: since when some router names it as missing
        self._missed_at: dict[bytes, float] = {}

    def call_on_news(self, call: Callable[[], None]) -> None:
        """Set the callback for news; its owner, which sends ``news``, is built after this."""
        self._on_news = call

    def watches(self, name: InstanceId) -> bool:
        """Tell whether this router probes an engine in each interval."""
        if len(self._missing) < WATCHERS:
            return True
        engine = self._engines.get(name)
        return engine is not None and engine.is_ours

    def missed_at(self, name: InstanceId) -> float | None:
        """Return since when another router names an engine as missing; None: no router does."""
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
        """Note that an engine failed a probe after a success, or the reverse."""
        if self._missing and self.watches(name):
            self._news[name] = is_missing
            if self._on_news is not None:
                self._on_news()

    def news(self) -> Sequence[bytes]:
        """Return the bodies of all changes since the last call."""
        news = self._news
        self._news = {}
        return bodies_of(
            [
                _ENTRY.pack(self._engine(name).name, _MISSING if is_missing else _ANSWERS_AGAIN)
                for name, is_missing in news.items()
            ]
        )

    def bodies(self) -> Sequence[bytes]:
        """Return the bodies to send every second, after ``expire``: the engines it watches.

        With so few routers that all probe all engines, only the missing ones are named.
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

    def receive(self, datagram: Datagram, /, *, now: float) -> DatagramFault | None:
        """Apply another router's entries; return why some were dropped, or None."""
        router = datagram.router
        missing = self._missing.setdefault(router, {})
        for engine, state in _ENTRY.iter_unpack(datagram.body):
            if (watched := self._by_name.get(engine)) is not None:
                watched.watchers[router] = now
            if state == _WATCHED:
                continue
            if state == _MISSING:
                if engine not in missing and len(missing) >= _MOST_ENGINES:
                    return DatagramFault.TOO_MANY
                missing[engine] = now
                self._missed_at.setdefault(engine, now)
            elif state == _ANSWERS_AGAIN:  # routers that still miss it will repeat that
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
        """Drop entries that were not repeated; decide which engines this router watches."""
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
        """Clear the time of an engine that no router names as missing any more."""
        if not any(engine in missing for missing in self._missing.values()):
            self._missed_at.pop(engine, None)

    def _engine(self, name: InstanceId) -> _Watched:
        engine = self._engines.get(name)
        if engine is None:
            member = self._registry.get(name)
            engine = _Watched(b"" if member is None else engine_name(member))
            self._engines[name] = engine
        return engine
