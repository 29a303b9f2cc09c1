"""The same engine for all requests of a session."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from pdrelay_proxy.core.model import ANY, Instance, RoutingHints
from pdrelay_proxy.core.routing.pairing import Policy

_MOST: Final = 4096  # sessions whose engine is remembered


class Session:
    """Rendezvous hashing: every engine bids for every session, and the highest bid wins.

    Nothing that counts is remembered: routers beside each other agree, before and after a restart.
    When an engine leaves, only its own sessions move; when one comes, sessions move only to it.
    """

    def __init__(self, otherwise: Policy) -> None:
        self._otherwise = otherwise
        # The engines that were chosen among last, and whom each session got: a thousand bids take a
        # millisecond.
        self._among: Sequence[Instance] = ()
        self._homes = dict[str, Instance]()

    def choose(self, among: Sequence[Instance], hints: RoutingHints = ANY, /) -> Instance:
        """Return the engine of the session; without a session, that of the other policy."""
        if hints.session is None:
            return self._otherwise.choose(among, hints)
        if among is not self._among or len(self._homes) >= _MOST:
            self._among = among
            self._homes = {}
        home = self._homes.get(hints.session)
        if home is None:
            session = hints.session.encode()
            home = max(among, key=lambda instance: _bid(instance, session))
            self._homes[hints.session] = home
        return home

    def copy(self) -> "Session":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return Session(self._otherwise.copy())


def _bid(instance: Instance, session: bytes) -> bytes:
    """Hash by the address: another router may have given the id to another engine."""
    name = f"{instance.address.authority}#{instance.rank}".encode()
    return blake2b(session, key=blake2b(name, digest_size=16).digest(), digest_size=8).digest()
