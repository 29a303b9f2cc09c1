"""Which routers of a fleet look at which engines, and what they tell each other of those that do not answer.

Each engine has ``WATCHERS`` routers that look at it in each interval; the others look once a minute, and at once when a
watcher says that the engine has missed a look, or answers again. So an engine gets few looks, however many routers
there are, and each router still judges by what it has seen itself.

Every second each router names the engines that it watches, and which of these are missing. It watches an engine while
fewer than ``WATCHERS`` others that name it are nearer to it, on a ring of all names (consistent hashing: few watchers
change when a router comes or goes). The nearest routers that know an engine never see so many, so they always watch it:
routers that do not know it, for they have another discovery or have just started, take no place from them. The others
wait a while before they believe that watchers are missing, because all would step in at once.

What is not repeated for three seconds counts no more. The body of a datagram is (engine 8, what of it 1) * n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from pdrelay_proxy.core.departed_routers import DepartedRouters
from pdrelay_proxy.core.fleet.load_exchange import engine_name
from pdrelay_proxy.core.fleet.probe_schedule import keeps_blocks
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.peer_datagrams import MOST_PEERS, Admits, DatagramFault, Envelope

LOOKS: Final = b"xpP2"  # the kind of these datagrams; in xpP1 each entry but 0 was a miss, and nobody named the others
WATCHERS: Final = 3  # of an engine: one may end, and one may be cut off from it
_ENTRY: Final = Struct(">8sB")
_ANSWERS_AGAIN: Final = 0  # said once
_MISSING: Final = 1
_WATCHED: Final = 2  # it answers, as far as this router has looked
_MOST_ENGINES: Final = 16_384  # that one peer may name as missing
_PATIENCE_S: Final = 3.0
_SHORT_S: Final = 2.0  # for so long an engine has too few watchers before another router watches it: two repeats


class _Watcher:
    """Another router; ``missing``: the engines that do not answer it, and when it said so last."""

    __slots__ = ("heard", "missing", "sequence")

    def __init__(self, heard: float) -> None:
        self.heard = heard
        self.sequence = 0
        self.missing: dict[bytes, float] = {}


@dataclass(slots=True)
class _Watched:
    """An engine of this router."""

    name: bytes
    others: dict[bytes, float] = field(default_factory=dict[bytes, float])  # that watch it: when they said so last
    short_since: float | None = None  # fewer than ``WATCHERS`` of them are nearer to it
    is_ours: bool = False

    def choose(self, me: bytes, *, now: float) -> None:
        """Decide whether this router watches it."""
        mine, nearer, late = (me < self.name, me), 0, list[bytes]()  # the ring begins at the engine
        for router, at in self.others.items():
            if now > at + _PATIENCE_S:
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


class LookExchange:
    """One router's side. ``now`` is seconds of a clock that only rises, ``wall`` seconds since 1970."""

    def __init__(
        self, registry: Registry, me: bytes, secret: bytes, introductions: Admits, *, looks: bool = True
    ) -> None:
        """``me``: 8 random bytes, others for each start of the process; ``looks``: this router looks at engines."""
        self._registry = registry
        self._introductions = introductions
        self._looks = looks
        self._envelope = Envelope(LOOKS, me, secret, _ENTRY.size)
        self._has_news: Callable[[], None] | None = None  # None: nothing is sent
        self._news: dict[InstanceId, bool] = {}  # by engine: it is missing now
        self._watchers: dict[bytes, _Watcher] = {}
        self._departed = DepartedRouters()
        self._engines: dict[InstanceId, _Watched] = {}
        self._by_name: dict[bytes, _Watched] = {}  # the same
        self._missed_at: dict[bytes, float] = {}  # by engine: since when somebody names it as missing

    def tell_of_news(self, hear: Callable[[], None]) -> None:
        """Have this called when there is news for the others, by what then sends ``news``: it is built with this."""
        self._has_news = hear

    def watches(self, name: InstanceId) -> bool:
        """Tell whether this router looks at an engine in each interval."""
        if len(self._watchers) < WATCHERS:
            return True
        found = self._engines.get(name)
        return found is not None and found.is_ours

    def missed_at(self, name: InstanceId) -> float | None:
        """Return since when another router has said that an engine does not answer it; None: none says so."""
        return self._missed_at.get(self._engine(name).name) if self._missed_at else None

    def was_missed(self, name: InstanceId, *, begun: float) -> bool:
        """Tell whether a look that has failed is one more, because another router has said before that it missed one.

        ``begun``: when the look began. Two that watch an engine may miss it in the same moment, which is one miss.
        """
        told_at = self.missed_at(name)
        return told_at is not None and (told_at <= begun or not self.watches(name))

    def note(self, name: InstanceId, *, is_missing: bool) -> None:
        """An engine has missed a look that answered before, or answers again."""
        if self._watchers and self.watches(name):
            self._news[name] = is_missing
            if self._has_news is not None:
                self._has_news()

    def news(self, *, wall: float) -> Sequence[bytes]:
        """Return what has changed since the others were told."""
        news, self._news = self._news, {}
        return self._envelope.sealed(
            [
                _ENTRY.pack(self._engine(one).name, _MISSING if is_missing else _ANSWERS_AGAIN)
                for one, is_missing in news.items()
            ],
            wall,
        )

    def datagrams(self, *, wall: float) -> Sequence[bytes]:
        """Return what the others are told every second, after ``expire``: the engines that this router watches.

        While it hears so few that all look at all, they need to know of those that are missing only.
        """
        names_all = self._looks and len(self._watchers) >= WATCHERS
        entries = [
            _ENTRY.pack(self._engine(member.instance.id).name, _MISSING if member.life.misses else _WATCHED)
            for member in self._registry.members()
            if (member.life.misses or (names_all and not keeps_blocks(member))) and self.watches(member.instance.id)
        ]
        return self._envelope.sealed(entries, wall) or [self._envelope.seal(b"", wall)]

    def receive(self, data: bytes, *, now: float, wall: float) -> DatagramFault | None:
        """Take in what another router says; say why it was dropped, or None. One's own datagrams say nothing."""
        opened = self._envelope.open_admitted(data, self._introductions, now=now, wall=wall)
        if opened is None or isinstance(opened, DatagramFault):
            return opened
        watcher = self._watcher(opened.router, opened.sequence, now)
        if isinstance(watcher, DatagramFault):
            return watcher
        watcher.heard, watcher.sequence = now, opened.sequence
        for engine, says in _ENTRY.iter_unpack(opened.body):
            if (known := self._by_name.get(engine)) is not None:
                known.others[opened.router] = now
            if says == _WATCHED:
                continue
            if says == _MISSING:
                if engine not in watcher.missing and len(watcher.missing) >= _MOST_ENGINES:
                    return DatagramFault.TOO_MANY
                watcher.missing[engine] = now
                self._missed_at.setdefault(engine, now)
            elif says == _ANSWERS_AGAIN:  # whoever still misses it says so again
                self._missed_at.pop(engine, None)
                for one in self._watchers.values():
                    one.missing.pop(engine, None)
            else:
                return DatagramFault.MALFORMED
        return None

    def expire(self, *, now: float) -> None:
        """Drop what was not repeated, and routers that are silent; decide what this router watches."""
        self._departed.expire(now=now)
        for router, watcher in list(self._watchers.items()):
            late = [engine for engine, at in watcher.missing.items() if now > at + _PATIENCE_S]
            if now > watcher.heard + _PATIENCE_S:
                self._departed.add(router, watcher.sequence, now=now)
                del self._watchers[router]
                late = list(watcher.missing)
            for engine in late:
                del watcher.missing[engine]
                if not any(engine in one.missing for one in self._watchers.values()):
                    self._missed_at.pop(engine, None)
        self._engines = {member.instance.id: self._engine(member.instance.id) for member in self._registry.members()}
        self._by_name = {one.name: one for one in self._engines.values()}
        for one in self._engines.values():
            one.choose(self._envelope.me, now=now)

    def _watcher(self, router: bytes, sequence: int, now: float) -> _Watcher | DatagramFault:
        watcher = self._watchers.get(router)
        if sequence <= (self._departed.sequence(router) if watcher is None else watcher.sequence):
            return DatagramFault.LATE  # what it says is repeated each second
        if watcher is None:
            if len(self._watchers) >= MOST_PEERS:
                return DatagramFault.TOO_MANY
            self._departed.remove(router)
            watcher = self._watchers[router] = _Watcher(now)
        return watcher

    def _engine(self, name: InstanceId) -> _Watched:
        found = self._engines.get(name)
        if found is None:
            member = self._registry.get(name)
            found = _Watched(b"" if member is None else engine_name(member))
            self._engines[name] = found
        return found
