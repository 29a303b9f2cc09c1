"""The same engine for all requests of a session."""

from collections.abc import Sequence
from hashlib import blake2b

from pdrelay_proxy.core.model import ANY, Instance, RoutingHints
from pdrelay_proxy.core.routing.pairing import Policy


class Session:
    """Rendezvous hashing: every engine bids for every session, and the highest bid wins.

    Nothing is remembered: routers beside each other agree, before and after a restart. When an
    engine leaves, only its own sessions move; when one comes, sessions move only to it.
    """

    def __init__(self, otherwise: Policy) -> None:
        self._otherwise = otherwise

    def choose(self, among: Sequence[Instance], hints: RoutingHints = ANY, /) -> Instance:
        """Return the engine of the session; without a session, that of the other policy."""
        if hints.session is None:
            return self._otherwise.choose(among, hints)
        session = hints.session.encode()
        return max(among, key=lambda instance: _bid(instance, session))

    def copy(self) -> "Session":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return Session(self._otherwise.copy())


def _bid(instance: Instance, session: bytes) -> bytes:
    """Hash by the address: another router may have given the id to another engine."""
    name = f"{instance.address.authority}#{instance.rank}".encode()
    return blake2b(session, key=blake2b(name, digest_size=16).digest(), digest_size=8).digest()
