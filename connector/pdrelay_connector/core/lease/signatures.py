"""Signatures of pull parameters: made by an engine that knows the connector's secret, and not older than the lease.

Parameters pass through places where others may change them: a client that may send ``kv_transfer_params`` to a decode
engine could otherwise name any block of any request. P signs every field that D acts on; D checks the signature first.

A loopback or wildcard host is not signed, because a router may replace it by the host it knows the engine by. The
handshake of the side channel proves which engine answers there.
"""

import hashlib
import hmac
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

import msgspec
from msgspec.structs import replace

from pdrelay_connector.core.lease.kv_params import PullParams
from pdrelay_connector.core.session.handshake import Secrets
from pdrelay_connector.errors import ExpiredKvParams, ForgedKvParams, UnsignedKvParams

LABEL: Final = b"pdrelay connector: offer of a prefill engine, version 1"  # the key is for nothing else
CLOCK_SKEW: Final = 300.0  # s that the clocks of two engines may differ (as Kerberos allows, RFC 4120, section 1.6)


@dataclass(frozen=True, slots=True)
class Signatures:
    """Signs and checks pull parameters with the secrets in force."""

    secrets: Secrets

    def sign(self, offer: PullParams) -> PullParams:
        """Return the offer with its signature; as it is when there is no secret."""
        secrets = self.secrets()
        if not secrets:
            return offer
        signed = replace(offer, remote_host=_signed_host(offer.remote_host))
        return replace(offer, pdrelay_signature=_signature(secrets[0], signed).decode())

    def check(self, offer: PullParams, *, now: float) -> bool:
        """Return whether there is a secret, and so a proof; ``now`` is s since the epoch, on this engine's clock.

        Raises:
            UnsignedKvParams: There is a secret and no signature.
            ForgedKvParams: The signature is of another offer, or made with another secret.
            ExpiredKvParams: It is older than :data:`CLOCK_SKEW` allows.
        """
        secrets = self.secrets()
        if not secrets:
            return False
        if offer.pdrelay_signature is None or offer.pdrelay_expires_at is None:
            raise UnsignedKvParams(
                f"the offer of {offer.remote_request_id} is not signed; PDRELAY_CONNECTOR_SECRET is set here, "
                f"and must be set on engine {offer.remote_engine_id}, too"
            )
        given = offer.pdrelay_signature.encode(errors="replace")
        variants = (offer, replace(offer, remote_host=""))
        expected = [_signature(secret, variant) for secret in secrets for variant in variants]
        if not any(hmac.compare_digest(given, each) for each in expected):  # a list: all of them, in equal time
            raise ForgedKvParams(
                f"the signature of the offer of {offer.remote_request_id} is wrong; it was changed on its way, "
                f"or PDRELAY_CONNECTOR_SECRET of engine {offer.remote_engine_id} differs"
            )
        if now > offer.pdrelay_expires_at + CLOCK_SKEW:
            raise ExpiredKvParams(
                f"the offer of {offer.remote_request_id} expired {now - offer.pdrelay_expires_at:.0f} s ago; "
                f"the clocks of two engines may differ by {CLOCK_SKEW:.0f} s"
            )
        return True


def _signature(secret: bytes, offer: PullParams) -> bytes:
    """Return the signature in hexadecimal digits: over every field, in their order, in MessagePack.

    Numbers, texts and their lengths have one encoding each there, as msgspec writes them.
    """
    key = hmac.digest(secret, LABEL, hashlib.sha256)
    fields = msgspec.structs.astuple(replace(offer, pdrelay_signature=None))
    return hmac.digest(key, msgspec.msgpack.encode(fields), hashlib.sha256).hex().encode()


def _signed_host(host: str) -> str:
    """Return the host as it is signed: empty if it leads to the machine itself, and a router may replace it."""
    name = host.lower().rstrip(".")
    if name in {"localhost", "localhost.localdomain"} or name.endswith(".localhost"):
        return ""
    try:
        address = ip_address(name.strip("[]"))
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address  # ::ffff:127.0.0.1
    return "" if address.is_unspecified or address.is_loopback else host
