"""The settings of the exchange between routers."""

from dataclasses import dataclass
from typing import Annotated, Final

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.declarations import Kind, Port
from pdrelay_proxy.errors import AddressError
from pdrelay_proxy.settings import ENGINES, SECURITY


def _checked(text: str) -> str:
    try:
        Address.parse(text)
    except AddressError as exc:
        raise ValueError(f"{text!r} is not where another router listens: write host:port") from exc
    return text


Peer = Annotated[str, Kind("", "PEER", check=_checked)]


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The choices, in the order of ``--help``."""

    # fmt: off
    peers: tuple[Peer, ...] = ENGINES.option((),
        "where the fleet's other routers listen (UDP), as host:port or one DNS name for all; routers tell each other "
        "the load of engines", chart="router.peers.enabled")
    peer_port: Port = ENGINES.option(8001,
        "UDP port on which this router listens to its peers", chart="router.peers.port")
    peer_secret: str | None = SECURITY.secret("PDRELAY_PEER_SECRET",
        "secret that the routers of a fleet prove to each other, for peers",
        unset="peers is refused", chart="router.peers.secret.name")
    # fmt: on


SETTINGS: Final = PeerSettings
