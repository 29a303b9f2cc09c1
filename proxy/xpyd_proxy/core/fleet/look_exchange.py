"""Which routers of a fleet look at which engines, and what they tell each other of those that do not answer.

Each engine has ``WATCHERS`` routers that look at it in each interval; the others look once a minute, and at once when a
watcher says that the engine has missed a look, or answers again. So an engine gets few looks, however many routers
there are, and each router still judges by what it has seen itself.

The watchers of an engine are the next routers on a ring of all names (consistent hashing), so few change when a router
comes or goes. Only routers that send these datagrams count. Every second each repeats which of its engines are missing;
what is not repeated for three seconds counts no more. The body of a datagram is (engine 8, missing 1) * n.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final

from xpyd_proxy.core.departed_routers import DepartedRouters
from xpyd_proxy.core.fleet.load_exchange import engine_name
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import InstanceId
from xpyd_proxy.core.peer_datagrams import MOST_PEERS, Admits, DatagramFault, Envelope

LOOKS: Final = b"xpP1"  # the kind of these datagrams
WATCHERS: Final = 3  # of an engine: one may end, and one may be cut off from it
_ENTRY: Final = Struct(">8sB")
_MOST_ENGINES: Final = 16_384  # that one peer may name
_PATIENCE_S: Final = 3.0


class _Watcher:
    """Another router; ``missing``: the engines that do not answer it, and when it said so last."""

    __slots__ = ("heard", "missing", "sequence")

    def __init__(self, heard: float) -> None:
        self.heard = heard
        self.sequence = 0
        self.missing: dict[bytes, float] = {}


class LookExchange:
    """One router's side. ``now`` is seconds of a clock that only rises, ``wall`` seconds since 1970."""

    def __init__(self, registry: Registry, me: bytes, secret: bytes, introductions: Admits) -> None:
        """``me``: 8 random bytes, others for each start of the process."""
        self._registry = registry
        self._introductions = introductions
        self._envelope = Envelope(LOOKS, me, secret, _ENTRY.size)
        self.changed: Callable[[], None] | None = None  # hears that the others have to be told something new
        self._news: dict[InstanceId, bool] = {}  # by engine: it is missing now
        self._watchers: dict[bytes, _Watcher] = {}
        self._departed = DepartedRouters()
        self._ring = [me]
        self._names: dict[InstanceId, bytes] = {}
        self._watched: dict[InstanceId, bool] = {}  # as the ring is now
        self._missed_at: dict[bytes, float] = {}  # by engine: since when somebody names it

    def watches(self, name: InstanceId) -> bool:
        """Tell whether this router looks at an engine in each interval."""
        if len(self._ring) <= WATCHERS:
            return True
        found = self._watched.get(name)
        if found is None:
            engine = self._name(name)
            at = bisect_left(self._ring, engine)
            nearest = [self._ring[(at + n) % len(self._ring)] for n in range(WATCHERS)]
            found = self._watched[name] = self._envelope.me in nearest
        return found

    def missed_at(self, name: InstanceId) -> float | None:
        """Return since when another router has said that an engine does not answer it; None: none says so."""
        return self._missed_at.get(self._name(name)) if self._missed_at else None

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
            if self.changed is not None:
                self.changed()

    def news(self, *, wall: float) -> Sequence[bytes]:
        """Return what has changed since the others were told."""
        news, self._news = self._news, {}
        return self._envelope.sealed(
            [_ENTRY.pack(self._name(one), is_missing) for one, is_missing in news.items()], wall
        )

    def datagrams(self, *, wall: float) -> Sequence[bytes]:
        """Return what the others are told every second: what is missing of the engines that this router watches."""
        members = self._registry.members()
        there = {member.instance.id for member in members}
        self._names = {name: found for name, found in self._names.items() if name in there}
        self._watched = {name: found for name, found in self._watched.items() if name in there}
        missing = [member for member in members if member.life.misses and self.watches(member.instance.id)]
        entries = [_ENTRY.pack(self._name(member.instance.id), True) for member in missing]  # noqa: FBT003 (a byte)
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
        for engine, is_missing in _ENTRY.iter_unpack(opened.body):
            if not is_missing:  # whoever still misses it says so again
                self._missed_at.pop(engine, None)
                for one in self._watchers.values():
                    one.missing.pop(engine, None)
            elif engine not in watcher.missing and len(watcher.missing) >= _MOST_ENGINES:
                return DatagramFault.TOO_MANY
            else:
                watcher.missing[engine] = now
                self._missed_at.setdefault(engine, now)
        return None

    def expire(self, *, now: float) -> None:
        """Drop what was not repeated, and routers that are silent."""
        self._departed.expire(now=now)
        for router, watcher in list(self._watchers.items()):
            late = [engine for engine, at in watcher.missing.items() if now > at + _PATIENCE_S]
            if now > watcher.heard + _PATIENCE_S:
                self._departed.add(router, watcher.sequence, now=now)
                del self._watchers[router]
                self._turn_ring()
                late = list(watcher.missing)
            for engine in late:
                del watcher.missing[engine]
                if not any(engine in one.missing for one in self._watchers.values()):
                    self._missed_at.pop(engine, None)

    def _watcher(self, router: bytes, sequence: int, now: float) -> _Watcher | DatagramFault:
        watcher = self._watchers.get(router)
        if sequence <= (self._departed.sequence(router) if watcher is None else watcher.sequence):
            return DatagramFault.LATE  # what it says is repeated each second
        if watcher is None:
            if len(self._watchers) >= MOST_PEERS:
                return DatagramFault.TOO_MANY
            self._departed.remove(router)
            watcher = self._watchers[router] = _Watcher(now)
            self._turn_ring()
        return watcher

    def _turn_ring(self) -> None:
        self._ring = sorted([self._envelope.me, *self._watchers])
        self._watched.clear()

    def _name(self, name: InstanceId) -> bytes:
        found = self._names.get(name)
        if found is None:
            member = self._registry.get(name)
            found = b"" if member is None else engine_name(member)
            self._names[name] = found
        return found
