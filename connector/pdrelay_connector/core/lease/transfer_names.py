"""P's transfers by the router's names: a router may abandon one before its blocks are leased."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from pdrelay_connector.core.ids import RequestId
from pdrelay_connector.core.messages import MAX_ID
from pdrelay_connector.errors import InvalidKvParams

# in the kv_transfer_params of a request whose only purpose is to say so
ABANDONED = "abandoned_transfer_id"
MAX_ABANDONED = 1024  # transfers


class TransferNames:
    """The leases of transfers, and the abandoned transfers that may still finish.

    A client may leave at the moment when P finishes its prompt. The router then closes its
    connection to P without P's answer, and vLLM does not tell a connector that a finished request
    was aborted.
    """

    def __init__(self) -> None:
        # of one, unless a router has used its name again, or for all prompts of one request
        self._leases: dict[str, dict[RequestId, None]] = {}
        self._transfers: dict[RequestId, str] = {}
        self._abandoned: dict[str, None] = {}  # oldest first

    def lend(self, transfer: str, lease: RequestId) -> None:
        """The blocks of a transfer are leased."""
        self._leases.setdefault(transfer, {})[lease] = None
        self._transfers[lease] = transfer

    def ended(self, lease: RequestId) -> None:
        """A lease is over."""
        transfer = self._transfers.pop(lease, None)
        if transfer is None:
            return
        leases = self._leases[transfer]
        del leases[lease]
        if not leases:
            del self._leases[transfer]

    def abandon(self, transfer: str) -> tuple[RequestId, ...]:
        """Return the leases of an abandoned transfer; remember a transfer that has none yet."""
        if transfer in self._leases:
            return tuple(self._leases[transfer])
        self._abandoned[transfer] = None
        if len(self._abandoned) > MAX_ABANDONED:
            del self._abandoned[next(iter(self._abandoned))]
        return ()

    def take_abandoned(self, transfer: str) -> bool:
        """Return whether a transfer, computed just now, was abandoned, and forget it."""
        return self._abandoned.pop(transfer, self) is None


def abandoned_transfer(params: Mapping[str, Any]) -> str | None:
    """Return the transfer that a request abandons; None: any other request.

    Raises :exc:`~pdrelay_connector.errors.InvalidKvParams`.
    """
    name = params.get(ABANDONED)
    if name is not None and not is_name(name):
        raise InvalidKvParams(
            f"kv_transfer_params: {ABANDONED} must be printable text of 1 to {MAX_ID} characters"
        )
    return name


def transfer_of(params: Mapping[str, Any]) -> str | None:
    """Return the name of a prefill's transfer; None: it has none, and cannot be abandoned."""
    name = params.get("transfer_id")
    return name if is_name(name) else None


def is_name(name: object) -> TypeGuard[str]:
    """Whether other engines take this as a name: of a lease, or of an engine."""
    return isinstance(name, str) and 0 < len(name) <= MAX_ID and name.isprintable()
