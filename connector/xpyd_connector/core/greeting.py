"""How two engines make sure of each other before the first word about blocks.

P opens with a nonce. D answers with its protocol version and a proof that it knows the
shared secret, bound to that nonce; without the secret it learns nothing about P's memory.
"""

import hashlib
import hmac
from dataclasses import dataclass

from xpyd_connector.core.ids import EngineId
from xpyd_connector.core.messages import PROTOCOL, Challenge, Hello, Message, Refusal, Welcome
from xpyd_connector.errors import ProtocolViolation

NONCE_BYTES = 32


def prove(secret: bytes, nonce: bytes) -> bytes:
    """Return the proof that we know ``secret``; empty when there is none."""
    return hmac.digest(secret, nonce, hashlib.sha256) if secret else b""


@dataclass(frozen=True, slots=True)
class Host:
    """P's side: what to answer to a Hello."""

    welcome: Welcome
    secret: bytes

    def answer(self, message: Message, nonce: bytes) -> Welcome | Refusal:
        """Judge a first message."""
        if not isinstance(message, Hello):
            return Refusal("the first message must be a hello")
        if message.protocol != PROTOCOL:
            return Refusal(f"engine {self.welcome.engine} speaks protocol {PROTOCOL}, you speak {message.protocol}")
        if not hmac.compare_digest(message.proof, prove(self.secret, nonce)):
            return Refusal("the shared secret (XPYD_CONNECTOR_SECRET) is missing or differs")
        return self.welcome


@dataclass(frozen=True, slots=True)
class Guest:
    """D's side: what to say to a Challenge."""

    engine: EngineId
    secret: bytes

    def hello(self, message: Message) -> Hello:
        """Answer a challenge, or raise :exc:`~xpyd_connector.errors.ProtocolViolation`."""
        if not isinstance(message, Challenge):
            raise ProtocolViolation(f"expected a challenge, got {type(message).__name__}")
        return Hello(PROTOCOL, self.engine, prove(self.secret, message.nonce))
