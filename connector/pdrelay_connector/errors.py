"""The exceptions of this package, and who is at fault.

* :exc:`ConnectorError`
    * :exc:`IllegalTransition` -- a bug in this package
    * :exc:`SettingsError` -- the operator: a setting cannot be used
    * :exc:`UnsupportedCache` -- the operator: this engine's KV cache has a shape we do not move
    * :exc:`UnreadableCheckpoint` -- the operator: the files of the model or of an adapter cannot be
      read
    * :exc:`HostBufferTooSmall` -- the operator: host memory (``staging_blocks``) is too small for
      one request's part
    * :exc:`PeerError` -- the other engine
        * :exc:`IncompatiblePeer` -- it stores its KV cache in a way we cannot read
            * :exc:`AnotherEngine` -- it is not the one that we expect at this address
        * :exc:`ProtocolViolation` -- it sent something that is not in the protocol
        * :exc:`Unreachable` -- it did not answer
            * :exc:`PortClosed` -- its machine says that no process listens there
    * :exc:`InvalidKvParams` -- the router: the ``kv_transfer_params`` it carried cannot be used
        * :exc:`PromptMismatch` -- they belong to another prompt
        * :exc:`AdapterMismatch` -- they belong to another LoRA adapter, or to other weights of it
        * :exc:`UnsignedKvParams` -- no signature proves that they are a prefill engine's
        * :exc:`ForgedKvParams` -- they are not as a prefill engine wrote them
        * :exc:`ReplacedHost` -- they are, but for the host, which a router has replaced
        * :exc:`ExpiredKvParams` -- they are older than the lease they tell of
    * :exc:`TransferError` -- NIXL or the network: bytes could not be moved
        * :exc:`BackendError` -- NIXL's backend, or its connection to the peer, is broken
"""


class ConnectorError(Exception):
    """Base class of every error raised by the connector."""


class IllegalTransition(ConnectorError):
    """An event arrived in a state that does not expect it."""


class SettingsError(ConnectorError):
    """A setting is unknown or has a value that cannot be used."""


class UnsupportedCache(ConnectorError):
    """The engine's KV cache has a shape this connector does not move."""


class UnreadableCheckpoint(ConnectorError):
    """The files of a model, or of an adapter, cannot be read."""


class HostBufferTooSmall(ConnectorError):
    """A part needs more slots of host memory than there are."""


class PeerError(ConnectorError):
    """The remote engine did something we cannot work with."""


class IncompatiblePeer(PeerError):
    """The remote engine's KV cache is incompatible, or one engine refuses the other.

    ``cause``: as ``vllm:pdrelay_peer_loads`` names it (``core/counters.py``).
    """

    def __init__(self, reason: str, cause: str = "refused") -> None:
        super().__init__(reason)
        self.cause = cause


class AnotherEngine(IncompatiblePeer):
    """Another engine, or another revision of this package, listens at the peer's address."""


class ProtocolViolation(PeerError):
    """The remote engine sent something that is not in the protocol."""


class Unreachable(PeerError):
    """The remote engine could not be reached, or did not answer in time."""


class PortClosed(Unreachable):
    """No process listens at the remote engine's address."""


class InvalidKvParams(ConnectorError):
    """The ``kv_transfer_params`` of a request cannot be used."""


class PromptMismatch(InvalidKvParams):
    """The KV belongs to another prompt, or its prompt is unknown."""


class AdapterMismatch(InvalidKvParams):
    """The KV was computed with another LoRA adapter, or with other weights of it."""


class UnsignedKvParams(InvalidKvParams):
    """This engine has a secret, and the offer has no signature."""


class ForgedKvParams(InvalidKvParams):
    """The offer's signature is wrong."""


class ReplacedHost(InvalidKvParams):
    """The offer's signature is right for another ``remote_host`` than it names now."""


class ExpiredKvParams(InvalidKvParams):
    """The offer's time is over."""


class TransferError(ConnectorError):
    """An operation of NIXL failed."""


class BackendError(TransferError):
    """NIXL's backend, or its connection to the peer, is broken: another one may work."""
