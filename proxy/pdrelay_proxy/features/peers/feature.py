"""Puts the exchange with other routers into a router."""

from typing import Final

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.feature import Core, Feature, FeatureParts, Ground
from pdrelay_proxy.features.peers.peer_counts import PeerCounts
from pdrelay_proxy.features.peers.router_peers import Meeting, RouterPeers
from pdrelay_proxy.features.peers.settings import PeerSettings
from pdrelay_proxy.io.worker_place import LOOPBACK
from pdrelay_proxy.settings import Settings

_LEAST_SECRET: Final = 16  # characters


class PeersFeature(Feature):
    """Exchanges loads, probes and quotas with peers, or with other workers of this machine."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.counts = PeerCounts()

    @staticmethod
    def check(settings: Settings, /) -> None:
        """Raise ConfigError if the settings of the exchange contradict each other."""
        chosen = settings.for_feature(PeerSettings)
        if not chosen.peers:
            return
        if settings.workers > 1:
            raise ConfigError(
                f"peers needs workers 1, not {settings.workers}: run more routers in place of "
                f"workers"
            )
        if len((chosen.peer_secret or "").encode()) < _LEAST_SECRET:
            raise ConfigError(
                f"peers needs a secret of {_LEAST_SECRET} characters or more in "
                f"PDRELAY_PEER_SECRET, the same for all: "
                "else anybody could say that engines are busy"
            )

    @staticmethod
    def has_other_routers(settings: Settings, /) -> bool:
        """Tell whether there are peers, or several workers."""
        return bool(settings.for_feature(PeerSettings).peers) or settings.workers > 1

    def parts(self, core: Core) -> FeatureParts:
        """Return the task of the exchange, and its metrics. Raises AddressError."""
        meeting = self._meeting()
        if meeting is None:
            return FeatureParts(families=self.counts.families)
        peers = RouterPeers(
            self.ground.engines.registry,
            core.serving.gate.admission,
            core.serving.keyring.names,
            self.counts,
            meeting,
            probes=self.ground.settings.health_check_interval_s > 0,
        )
        core.serving.fleet.tell_load_changes(peers.changed)
        return FeatureParts(
            (peers.running,), families=self.counts.families, other_probes=peers.probes
        )

    def _meeting(self) -> Meeting | None:
        """Return the addresses and the secret of the exchange; None: no other routers."""
        settings = self.ground.settings
        place = self.ground.place
        if place is not None:
            addresses = [Address("http", LOOPBACK, port) for port in place.peer_ports]
            return Meeting(addresses, place.secret.encode(), place.peer_socket)
        chosen = settings.for_feature(PeerSettings)
        if not chosen.peers:
            return None
        addresses = [Address.parse(text) for text in chosen.peers]
        return Meeting(
            addresses, (chosen.peer_secret or "").encode(), (settings.host, chosen.peer_port)
        )


FEATURE: Final = PeersFeature
