"""What each router of a fleet has let in, for limits that are the fleet's: counts that only add up.

Once a second each router tells what each key was served by it since it started: requests, and
tokens of prompts and answers. The others charge the difference to what they heard before. So a lost
datagram is made up for by the next one, and whatever the routers let in too much within that second
is paid back: in the long run the fleet keeps its limits.

The body of a datagram is (key 8, requests 8, tokens 8, new requests 4, new tokens 4) * n. The new
ones are what came since the key was told of before: all that a router charges that hears of the key
for the first time. A key is named by a hash of its name, and the empty name stands for all clients
together.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import Final

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.admission.key_usage import KeyUsage
from pdrelay_proxy.features.peers.core.datagrams import (
    NAME_BYTES,
    DatagramFault,
    DatagramKind,
    Opened,
    bodies_of,
)

_ENTRY: Final = Struct(">8sqqii")
QUOTAS: Final = DatagramKind(b"xpQ1", _ENTRY.size)
_MOST_NEW: Final = 2**31 - 1
_MOST_KEYS: Final = 16_384  # that one peer may name
_REPEATS: Final = 5  # times that a count is told after it has changed
_REREAD_S: Final = 1.0  # between two readings of the names of keys, for one that is not known


@dataclass(slots=True)
class _ToldUsage:
    """The latest that the others were told of a key."""

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
        self.new_requests = usage.requests - self.requests
        self.new_tokens = usage.tokens - self.tokens
        self.requests = usage.requests
        self.tokens = usage.tokens
        self.times = 0


class QuotaPayload:
    """One router's side. ``now`` is seconds of a clock that only rises."""

    def __init__(self, admission: Admission, key_names: Callable[[], Iterable[str]]) -> None:
        """``key_names``: of the keys that clients may have."""
        self._admission = admission
        self._key_names = key_names
        self._known: dict[bytes, str] = {}
        self._read_at = -_REREAD_S
        self._told: dict[str, _ToldUsage] = {}
        self._counts: dict[bytes, dict[bytes, tuple[int, int]]] = {}  # by router and key

    def bodies(self) -> Sequence[bytes]:
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
        return bodies_of(entries)

    def receive(self, heard: Opened, /, *, now: float) -> DatagramFault | None:
        """Charge what another router has let in; return why some of it was dropped, or None."""
        counts = self._counts.setdefault(heard.router, {})
        for key, requests, tokens, new_requests, new_tokens in _ENTRY.iter_unpack(heard.body):
            before = counts.get(key, (requests - new_requests, tokens - new_tokens))
            if key not in counts and len(counts) >= _MOST_KEYS:
                return DatagramFault.TOO_MANY
            counts[key] = requests, tokens
            if before != (requests, tokens) and (name := self._name(key, now)) is not None:
                self._admission.charge_elsewhere(
                    name, requests - before[0], tokens - before[1], now=now
                )
        return None

    def expire(
        self,
        departed: Sequence[bytes],  # noqa: ARG002
        forgotten: Sequence[bytes],
        /,
        *,
        now: float,  # noqa: ARG002
    ) -> None:
        """Drop the counts of routers that begin anew; one that is cut off may let in more
        meanwhile.
        """
        for router in forgotten:
            self._counts.pop(router, None)

    def _name(self, key: bytes, now: float) -> str | None:
        """Return the name of a key; None: there is no such key here."""
        if key not in self._known and now >= self._read_at + _REREAD_S:
            self._read_at = now
            self._known = {_digest(name): name for name in ("", *self._key_names())}
        return self._known.get(key)


def _digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=NAME_BYTES).digest()
