"""What each router of a fleet has let in, for limits that are the fleet's: datagrams with counts that only add up.

Once a second each router tells what each key was served by it since it started: requests, and tokens of prompts and
answers. The others charge the difference to what they heard before. So a lost datagram is made up for by the next one,
and whatever the routers let in too much within that second is paid back: in the long run the fleet keeps its limits.

The body of a datagram is (key 8, requests 8, tokens 8, new requests 4, new tokens 4) * n. The new ones are what came
since the key was told of before: all that a router charges that hears of the key for the first time. A key is named by
a hash of its name, and the empty name stands for all clients together.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct
from typing import Final

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.admission.key_usage import KeyUsage
from pdrelay_proxy.core.departed_routers import DepartedRouters
from pdrelay_proxy.core.peer_datagrams import MOST_PEERS, NAME_BYTES, Admits, DatagramFault, Envelope

QUOTAS: Final = b"xpQ1"  # the kind of these datagrams
_ENTRY: Final = Struct(">8sqqii")
_MOST_NEW: Final = 2**31 - 1
_MOST_KEYS: Final = 16_384  # that one peer may name
_REPEATS: Final = 5  # times that a count is told after it has changed
_PATIENCE_S: Final = 60.0  # without a word, after which a router is forgotten
_LOOK_S: Final = 1.0  # between two looks for the name of a key that is not known


@dataclass(slots=True)
class _QuotaPeer:
    """One other router."""

    heard: float
    sequence: int
    counts: dict[bytes, tuple[int, int]] = field(default_factory=dict[bytes, tuple[int, int]])


@dataclass(slots=True)
class _ToldUsage:
    """What the others were told of a key last."""

    requests: int = 0
    tokens: int = 0
    new_requests: int = 0
    new_tokens: int = 0
    times: int = 0

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Return what an entry says."""
        new = min(self.new_requests, _MOST_NEW), max(-_MOST_NEW, min(self.new_tokens, _MOST_NEW))
        return self.requests, self.tokens, *new

    def follow(self, usage: KeyUsage) -> None:
        """There is something new to tell."""
        self.new_requests, self.new_tokens = usage.requests - self.requests, usage.tokens - self.tokens
        self.requests, self.tokens, self.times = usage.requests, usage.tokens, 0


class QuotaExchange:
    """One router's side. ``now`` is seconds of a clock that only rises, ``wall`` seconds since 1970."""

    def __init__(
        self,
        admission: Admission,
        me: bytes,
        secret: bytes,
        names: Callable[[], Iterable[str]],
        introductions: Admits,
    ) -> None:
        """``names``: of the keys that clients may have."""
        self._admission = admission
        self._introductions = introductions
        self._envelope = Envelope(QUOTAS, me, secret, _ENTRY.size)
        self._names = names
        self._known: dict[bytes, str] = {}
        self._looked = -_LOOK_S
        self._told: dict[str, _ToldUsage] = {}
        self._peers: dict[bytes, _QuotaPeer] = {}
        self._departed = DepartedRouters()

    def datagrams(self, *, wall: float) -> list[bytes]:
        """Return what the others have to be told; call it once a second."""
        entries = list[bytes]()
        for key, usage in self._admission.usage.items():
            told = self._told.get(key)
            if told is None:
                told = self._told[key] = _ToldUsage()
            if (told.requests, told.tokens) != (usage.requests, usage.tokens):
                told.follow(usage)
            if told.times < _REPEATS:
                told.times += 1
                entries.append(_ENTRY.pack(_digest(key), *told.numbers))
        return self._envelope.sealed(entries, wall)

    def receive(self, data: bytes, *, now: float, wall: float) -> DatagramFault | None:
        """Charge what another router has let in; say why a datagram was dropped, or None."""
        opened = self._envelope.open_admitted(data, self._introductions, now=now, wall=wall)
        if opened is None or isinstance(opened, DatagramFault):
            return opened
        peer = self._peer(opened.router, opened.sequence, now)
        if isinstance(peer, DatagramFault):
            return peer
        peer.heard, peer.sequence = now, opened.sequence
        for key, requests, tokens, new_requests, new_tokens in _ENTRY.iter_unpack(opened.body):
            before = peer.counts.get(key, (requests - new_requests, tokens - new_tokens))
            if key not in peer.counts and len(peer.counts) >= _MOST_KEYS:
                return DatagramFault.TOO_MANY
            peer.counts[key] = requests, tokens
            if before != (requests, tokens) and (name := self._name(key, now)) is not None:
                self._admission.charge_elsewhere(name, requests - before[0], tokens - before[1], now=now)
        return None

    def expire(self, *, now: float) -> None:
        """Forget what routers that are silent have counted: one that comes back begins anew."""
        for router in [router for router, peer in self._peers.items() if now > peer.heard + _PATIENCE_S]:
            self._departed.add(router, self._peers.pop(router).sequence, now=now)
        self._departed.expire(now=now)

    def _peer(self, router: bytes, sequence: int, now: float) -> _QuotaPeer | DatagramFault:
        """Return who sent a datagram, or why it is dropped: newer ones came first, or there are too many routers."""
        peer = self._peers.get(router)
        if sequence <= (self._departed.sequence(router) if peer is None else peer.sequence):
            return DatagramFault.LATE
        if peer is None:
            if len(self._peers) >= MOST_PEERS:
                return DatagramFault.TOO_MANY
            self._departed.remove(router)
            peer = self._peers[router] = _QuotaPeer(now, 0)
        return peer

    def _name(self, key: bytes, now: float) -> str | None:
        """Return the name of a key; None: there is no such key here."""
        if key not in self._known and now >= self._looked + _LOOK_S:
            self._looked = now
            self._known = {_digest(name): name for name in ("", *self._names())}
        return self._known.get(key)


def _digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=NAME_BYTES).digest()
