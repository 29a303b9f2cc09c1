"""Signatures of pull params: they prove the connector's secret, and are no older than the lease.

Params pass through processes that may change them: without a signature a client that can send
``kv_transfer_params`` to a decode engine could name any block of any request. P signs every field
that D uses; D checks the signature first.

A loopback or wildcard host is not signed, because a router may replace it by the engine's address;
with ``sign_host: false`` no host is signed. The handshake of the side channel proves which engine
answers there.

If a router replaces a signed host, each transfer fails. So the offer repeats the signed host in an
unsigned field: if the signature is right with that host, only the host was changed, and D can name
the cause.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from pdrelay_connector.core.addresses import is_own_host
from pdrelay_connector.core.lease.kv_params import PullParams
from pdrelay_connector.core.session.handshake import Secrets
from pdrelay_connector.errors import ExpiredKvParams, ForgedKvParams, ReplacedHost, UnsignedKvParams

# the key is for nothing else
LABEL: Final = b"pdrelay connector: offer of a prefill engine, version 1"
# fields; the last is the signature, empty
_SIGNED: Final = PullParams.__struct_fields__.index("pdrelay_host")
# s that the clocks of two engines may differ (as Kerberos allows, RFC 4120, section 1.6)
CLOCK_SKEW: Final = 300.0


@dataclass(frozen=True, slots=True)
class Signatures:
    """Signs and checks pull parameters with the secrets in force."""

    secrets: Secrets
    signs_host: bool = True  # unless it is the machine itself

    def sign(self, offer: PullParams) -> PullParams:
        """Return the offer with its signature; as it is when there is no secret."""
        secrets = self.secrets()
        if not secrets:
            return offer
        host = offer.remote_host if self.signs_host and not is_own_host(offer.remote_host) else ""
        signature = _signature(secrets[0], replace(offer, remote_host=host)).decode()
        return replace(offer, pdrelay_signature=signature, pdrelay_host=host or None)

    def check(self, offer: PullParams, *, now: float) -> bool:
        """Check the signature; return False if there is no secret. ``now``: s since the epoch.

        Raises:
            UnsignedKvParams: There is a secret and no signature.
            ForgedKvParams: The signature is of another offer, or made with another secret.
            ReplacedHost: It is of the same offer with another host.
            ExpiredKvParams: It is older than :data:`CLOCK_SKEW` allows.
        """
        secrets = self.secrets()
        if not secrets:
            return False
        if offer.pdrelay_signature is None or offer.pdrelay_expires_at is None:
            raise UnsignedKvParams(
                f"the offer of {offer.remote_request_id} is not signed; PDRELAY_CONNECTOR_SECRET "
                f"is set here, and must be set on engine {offer.remote_engine_id}, too"
            )
        if not _is_signed(secrets, offer, offer.pdrelay_signature):
            raise _refusal(secrets, offer, offer.pdrelay_signature)
        if now > offer.pdrelay_expires_at + CLOCK_SKEW:
            raise ExpiredKvParams(
                f"the offer of {offer.remote_request_id} expired "
                f"{now - offer.pdrelay_expires_at:.0f} s ago; "
                f"the clocks of two engines may differ by {CLOCK_SKEW:.0f} s"
            )
        return True


def _is_signed(secrets: Sequence[bytes], offer: PullParams, signature: str) -> bool:
    received = signature.encode(errors="replace")
    variants = (offer, replace(offer, remote_host=""))
    expected = [_signature(secret, variant) for secret in secrets for variant in variants]
    # a list: all of them, in equal time
    return any(hmac.compare_digest(received, candidate) for candidate in expected)


def _refusal(
    secrets: Sequence[bytes], offer: PullParams, signature: str
) -> ForgedKvParams | ReplacedHost:
    signed = offer.pdrelay_host
    if signed is not None and _is_signed(secrets, replace(offer, remote_host=signed), signature):
        return ReplacedHost(
            f"the offer of {offer.remote_request_id} names the host {offer.remote_host}, and "
            f"engine "
            f"{offer.remote_engine_id} has signed {signed}: a router replaces remote_host; set "
            f'"sign_host": false in '
            "kv_connector_extra_config of the prefill engines"
        )
    return ForgedKvParams(
        f"the signature of the offer of {offer.remote_request_id} is wrong; it was changed on its "
        f"way, or PDRELAY_CONNECTOR_SECRET of engine {offer.remote_engine_id} differs"
    )


def _signature(secret: bytes, offer: PullParams) -> bytes:
    """Return the signature as hexadecimal digits, over the fields before it in MessagePack.

    Numbers, texts and their lengths have one encoding each there, as msgspec writes them.
    """
    key = hmac.digest(secret, LABEL, hashlib.sha256)
    fields = msgspec.structs.astuple(replace(offer, pdrelay_signature=None))[:_SIGNED]
    return hmac.digest(key, msgspec.msgpack.encode(fields), hashlib.sha256).hex().encode()
