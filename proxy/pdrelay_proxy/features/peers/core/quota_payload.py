"""What each router of a fleet has admitted, for limits of the whole fleet: cumulative counts.

Once a second each router reports what it served to each key since it started: requests, and tokens
of prompts and answers. The others charge the difference from the report before. So the next
datagram makes up for a lost one, and requests that all routers together admitted beyond a limit
within that second are charged later: in the long run the fleet keeps its limits.

The body of a datagram is (key 8, requests 8, tokens 8, new requests 4, new tokens 4) * n. The new
counts are those since the report before: a router that hears of the key for the first time charges
only these. A key is named by a hash of its name; the empty name stands for all clients together.
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
    Datagram,
    DatagramFault,
    DatagramKind,
    bodies_of,
)

_ENTRY: Final = Struct(">8sqqii")
QUOTAS: Final = DatagramKind(b"xpQ1", _ENTRY.size)
_MOST_NEW: Final = 2**31 - 1
_MOST_KEYS: Final = 16_384  # of one peer
_REPEATS: Final = 5  # times that a changed count is sent
_REREAD_S: Final = 1.0  # at least, between two readings of the keys for an unknown one


@dataclass(slots=True)
class _ReportedUsage:
    """The latest report of a key."""

    requests: int = 0
    tokens: int = 0
    new_requests: int = 0
    new_tokens: int = 0
    times: int = 0

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Return the fields of an entry."""
        new = min(self.new_requests, _MOST_NEW), max(-_MOST_NEW, min(self.new_tokens, _MOST_NEW))
        return self.requests, self.tokens, *new

    def follow(self, usage: KeyUsage) -> None:
        """Take over new counts; they are sent from the first repeat on."""
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
        self._names_by_digest: dict[bytes, str] = {}
        self._read_at = -_REREAD_S
        self._reported: dict[str, _ReportedUsage] = {}
        self._counts: dict[bytes, dict[bytes, tuple[int, int]]] = {}  # by router and key

    def bodies(self) -> Sequence[bytes]:
        """Return the bodies to send; call it once a second."""
        entries = list[bytes]()
        for key, usage in self._admission.usage.items():
            reported = self._reported.get(key)
            if reported is None:
                reported = self._reported[key] = _ReportedUsage()
            if (reported.requests, reported.tokens) != (usage.requests, usage.tokens):
                reported.follow(usage)
            if reported.times < _REPEATS:
                reported.times += 1
                entries.append(_ENTRY.pack(_digest(key), *reported.numbers))
        return bodies_of(entries)

    def receive(self, datagram: Datagram, /, *, now: float) -> DatagramFault | None:
        """Charge what another router has admitted; return why a part was dropped, or None."""
        counts = self._counts.setdefault(datagram.router, {})
        for key, requests, tokens, new_requests, new_tokens in _ENTRY.iter_unpack(datagram.body):
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
        """Drop the counts of forgotten routers; a router that is cut off keeps its counts."""
        for router in forgotten:
            self._counts.pop(router, None)

    def _name(self, key: bytes, now: float) -> str | None:
        """Return the name of a key; None: unknown here."""
        if key not in self._names_by_digest and now >= self._read_at + _REREAD_S:
            self._read_at = now
            self._names_by_digest = {_digest(name): name for name in ("", *self._key_names())}
        return self._names_by_digest.get(key)


def _digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=NAME_BYTES).digest()
