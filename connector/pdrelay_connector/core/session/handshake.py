"""How two engines authenticate each other before any message about blocks.

The connection is TLS 1.3. The server (P) sends a nonce. The client (D, or a worker of the server's
own engine) sends who it is, the engine it expects, the address it dialled, and a proof that it
knows the shared secret. The server proves the same, and only then sends its Welcome. Both proofs
cover the fingerprint of the server's certificate (as the channel binding "tls-server-end-point" of
RFC 5929 does), so a relay, which has another certificate, cannot pass them on.
"""

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import msgspec

from pdrelay_connector.core.addresses import plain_ip
from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.messages import (
    HASH_BYTES,
    PROTOCOL,
    Challenge,
    Hello,
    Message,
    Refusal,
    ServerProof,
    Welcome,
)
from pdrelay_connector.errors import AnotherEngine, IncompatiblePeer, ProtocolViolation

NONCE_BYTES = 32
# those in force now, the one to use first; empty: none is set
Secrets: TypeAlias = Callable[[], tuple[bytes, ...]]


class ProcessRole(StrEnum):
    """Which process of an engine opened the connection."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class _ProofLabel(StrEnum):
    CLIENT = f"pdrelay side channel {PROTOCOL}, client"
    SERVER = f"pdrelay side channel {PROTOCOL}, server"


class ClientConnection(NamedTuple):
    """A connection as the client that opened it sees it."""

    expects: EngineId  # the engine that it wants to reach
    dialled: Address  # as the offer names it
    reached: str  # IP address that the name led to
    certificate: bytes  # SHA-256 of the server's certificate
    nonce: bytes  # the client's own, fresh


class ServerConnection(NamedTuple):
    """A connection as the server that accepted it sees it."""

    reached: Address  # our end of the connection
    certificate: bytes  # SHA-256 of the certificate that it was shown
    nonce: bytes  # the server's own, fresh


class Accepted(NamedTuple):
    """The server accepts a client: its Hello, and the answers to it."""

    hello: Hello
    proof: ServerProof
    welcome: Welcome


def badge_of(token: bytes) -> bytes:
    """Return a worker's badge for other engines; its token stays secret with its scheduler."""
    return hashlib.sha256(b"badge of a worker" + token).digest()


def hash_of(badge: bytes) -> bytes:
    """Return the hash of a worker's badge, by which other engines recognise the worker."""
    return hashlib.sha256(badge).digest()[:HASH_BYTES]


def are_of_one_engine(first: Hello, second: Hello) -> bool:
    """Whether processes of one engine opened two connections: its scheduler, and a named worker.

    A scheduler that connects again names the same workers.
    """
    if first.engine != second.engine:
        return False
    if first.workers and first.workers == second.workers:
        return True
    return hash_of(first.badge) in second.workers or hash_of(second.badge) in first.workers


@dataclass(frozen=True, slots=True)
class HandshakeClient:
    """The side that opens a connection."""

    engine: EngineId
    secrets: Secrets
    role: ProcessRole = ProcessRole.SCHEDULER
    badge: bytes = b""  # of a worker
    workers: tuple[bytes, ...] = ()  # of a scheduler: hashes of its workers' badges

    def hello(self, message: Message, call: ClientConnection) -> Hello:
        """Answer a challenge, or raise :exc:`~pdrelay_connector.errors.PeerError`."""
        if not isinstance(message, Challenge):
            raise ProtocolViolation(f"expected a challenge, got {type(message).__name__}")
        if message.protocol != PROTOCOL:
            raise AnotherEngine(
                f"it speaks protocol {message.protocol}, we speak {PROTOCOL}", "version"
            )
        hello = Hello(
            PROTOCOL, self.engine, self.role.value, call.expects, call.dialled.host, call.dialled.port, call.reached,
            call.nonce, (), self.badge, self.workers,
        )  # fmt: skip
        proofs = tuple(
            _prove(secret, _ProofLabel.CLIENT, message.nonce, hello, call.certificate)
            for secret in self.secrets()
        )
        return msgspec.structs.replace(hello, proofs=proofs)

    def check(
        self, proof: ServerProof, challenge: Challenge, hello: Hello, certificate: bytes
    ) -> None:
        """Raise :exc:`~pdrelay_connector.errors.IncompatiblePeer` unless it proves a secret."""
        secrets = self.secrets()
        if not secrets and not hello.proofs:
            return
        right = (
            _prove(secret, _ProofLabel.SERVER, challenge.nonce, hello, certificate)
            for secret in secrets
        )
        if not any(hmac.compare_digest(proof.proof, expected) for expected in right):
            raise IncompatiblePeer(
                "it does not prove the shared secret (PDRELAY_CONNECTOR_SECRET); set the same on "
                "both",
                "secret",
            )


@dataclass(frozen=True, slots=True)
class HandshakeServer:
    """The side that listens."""

    welcome: Welcome
    secrets: Secrets
    advertised: str = ""  # the host name or address that offers name
    closed: str = ""  # why nobody is accepted, if so

    def answer(self, message: Message, arrival: ServerConnection) -> Accepted | Refusal:
        """Check a client's Hello.

        A refusal reveals nothing that a client without the secret does not know.
        """
        if not isinstance(message, Hello):
            return Refusal("the first message must be a hello")
        if message.protocol != PROTOCOL:
            return Refusal(
                f"this engine speaks protocol {PROTOCOL}, you speak {message.protocol}",
                cause="version",
            )
        secrets = self.secrets()
        matching = next(
            (secret for secret in secrets if self._proves(secret, message, arrival)), None
        )
        if secrets and matching is None:
            return Refusal(
                "the shared secret (PDRELAY_CONNECTOR_SECRET) is missing or differs", cause="secret"
            )
        if not secrets and message.proofs:
            return Refusal(
                "you have a shared secret (PDRELAY_CONNECTOR_SECRET), this engine has none; set "
                "the same on both",
                cause="secret",
            )
        if self.closed or not message.engine.isprintable():  # a log names it
            return Refusal(
                self.closed or "your engine id is not printable text; set another engine_id"
            )
        if message.expects != self.welcome.engine:
            return Refusal(
                f"engine {message.expects} does not answer here (any more), another one does",
                is_another=True,
            )
        if not self._is_ours(message, arrival.reached):
            return Refusal(
                f"you dialled {message.host}:{message.port} and reached {message.reached}, this "
                "engine does not listen there; set VLLM_NIXL_SIDE_CHANNEL_HOST to the address that "
                "other engines reach it at"
            )
        proof = (
            _prove(matching, _ProofLabel.SERVER, arrival.nonce, message, arrival.certificate)
            if matching
            else b""
        )
        return Accepted(message, ServerProof(proof), self.welcome)

    @staticmethod
    def _proves(secret: bytes, hello: Hello, arrival: ServerConnection) -> bool:
        right = _prove(secret, _ProofLabel.CLIENT, arrival.nonce, hello, arrival.certificate)
        return any(hmac.compare_digest(proof, right) for proof in hello.proofs)

    def _is_ours(self, hello: Hello, reached: Address) -> bool:
        """Whether the client dialled this server, and not a relay."""
        if hello.port != reached.port:
            return False
        return hello.host == self.advertised or plain_ip(hello.reached) == plain_ip(reached.host)


def _prove(
    secret: bytes, prover: _ProofLabel, nonce: bytes, hello: Hello, certificate: bytes
) -> bytes:
    """Return a proof of the secret over the handshake's messages: HMAC-SHA256 (RFC 2104)."""
    unsigned = msgspec.structs.replace(hello, proofs=())
    return hmac.digest(
        secret, msgspec.msgpack.encode((prover.value, nonce, unsigned, certificate)), hashlib.sha256
    )
