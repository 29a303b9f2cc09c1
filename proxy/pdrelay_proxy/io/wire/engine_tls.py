"""TLS to engines: trusted authorities, names of certificates, and failures as one sentence."""

import ssl
from collections import Counter
from typing import Final

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.model import Instance
from pdrelay_proxy.errors import causes


class TlsFailure(FastStrEnum):
    """Why a TLS connection to an engine failed, as metrics name it."""

    WRONG_NAME = "wrong_name"
    UNTRUSTED = "untrusted"  # no authority of engine_ca has signed the engine's certificate
    EXPIRED = "expired"  # or it is not valid yet
    REFUSED = "refused"  # the engine wants a certificate of the router, or another one
    NOT_TLS = "not_tls"
    OTHER = "other"


# X509_V_ERR_* of OpenSSL (x509_vfy.h): what verify_code of Python's SSLCertVerificationError is.
_BY_CODE: Final = {
    **dict.fromkeys((62, 64), TlsFailure.WRONG_NAME),  # of a DNS name, of an IP address
    **dict.fromkeys((2, 18, 19, 20, 21), TlsFailure.UNTRUSTED),
    **dict.fromkeys((9, 10), TlsFailure.EXPIRED),
}
# Reasons of OpenSSL for bytes that are no TLS record: a server of plain HTTP answers a handshake
# with 400.
_NO_RECORD: Final = frozenset(
    {"WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"}
)
# Alerts about a certificate (RFC 8446, 6.2): those of an engine are about the router's.
_ABOUT_CERTIFICATES: Final = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")


class EngineTls:
    """The TLS settings of new connections to https engines; http engines do not use it."""

    __slots__ = ("context", "failures", "server_name")

    def __init__(self, context: ssl.SSLContext, server_name: str | None = None) -> None:
        """``server_name``: the name in all certificates; None: the host of each address."""
        self.context = context
        self.server_name = server_name
        self.failures: Counter[tuple[str, ...]] = Counter()  # by instance and TlsFailure

    @classmethod
    def from_system(cls) -> "EngineTls":
        """Trust the system's authorities."""
        return cls(ssl.create_default_context())

    def name_of(self, address: Address) -> str:
        """Return the name that the certificate of an engine there must have."""
        return address.host if self.server_name is None else self.server_name

    def failure(
        self, instance: Instance, error: BaseException, *, was_open: bool = False
    ) -> str | None:
        """Count a TLS failure, and return it as a sentence's predicate about the engine; None: the
        error is not of TLS.

        The sentence has no address: clients may read it. ``was_open``: the connection was open
        already, where only one error is about trust: with TLS 1.3 an engine refuses the router's
        certificate after the handshake (RFC 8446, 4.4.2.4).
        """
        ssl_error = _ssl_error(error)
        if ssl_error is None:
            return None
        kind = _kind(ssl_error)
        if was_open and kind is not TlsFailure.REFUSED:
            return None
        self.failures[instance.id, kind] += 1
        return self._sentence(kind, ssl_error)

    def _sentence(self, kind: TlsFailure, error: ssl.SSLError) -> str:
        reason = (
            error.verify_message
            if isinstance(error, ssl.SSLCertVerificationError)
            else _reason(error)
        )
        if kind is TlsFailure.WRONG_NAME and self.server_name is not None:
            return f"shows a certificate that is not for {self.server_name} (engine_server_name)"
        return {
            TlsFailure.WRONG_NAME: "shows a certificate that is not for its address (engine_server_name names another)",
            TlsFailure.UNTRUSTED: f"shows a certificate of no authority that the router trusts (engine_ca): {reason}",
            TlsFailure.EXPIRED: f"shows a certificate that is not valid now: {reason}",
            TlsFailure.REFUSED: f"does not accept the router's certificate (engine_cert): {reason}",
            TlsFailure.NOT_TLS: "speaks no TLS, though its address begins with https",
            TlsFailure.OTHER: f"fails in the TLS handshake: {reason}",
        }[kind]


def _kind(error: ssl.SSLError) -> TlsFailure:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _BY_CODE.get(error.verify_code, TlsFailure.OTHER)
    reason = error.reason or ""
    if reason in _NO_RECORD:
        return TlsFailure.NOT_TLS
    if "ALERT" in reason and any(word in reason for word in _ABOUT_CERTIFICATES):
        return TlsFailure.REFUSED
    return TlsFailure.OTHER


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or type(error).__name__).lower().replace("_", " ")


def _ssl_error(error: BaseException | None) -> ssl.SSLError | None:
    """Return the TLS error behind a library's error; the end of a connection is none."""
    for cause in causes(error):
        if isinstance(cause, ssl.SSLError):
            return None if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError) else cause
    return None
