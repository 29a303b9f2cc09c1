"""TLS 1.3 for the side channel, with the operator's certificates or one that is made at start."""

import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pdrelay_connector.errors import SettingsError
from pdrelay_connector.io.reloaded import ReloadedFiles
from pdrelay_connector.settings import Settings


@dataclass(frozen=True, slots=True)
class Contexts:
    """What connections are opened and accepted with."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes  # SHA-256 of the server's


class Tls:
    """The TLS of one process; its contexts are made anew when an operator's file has changed."""

    def __init__(self, settings: Settings) -> None:
        """Raises :exc:`~pdrelay_connector.errors.SettingsError` if a file cannot be used."""
        self.server_name = settings.tls_server_name
        files = [path for path in (settings.tls_cert, settings.tls_key, settings.tls_ca) if path]
        # call it for those in force
        self.contexts = ReloadedFiles("certificates", files, lambda: _make(settings))


def digest_of(certificate: bytes | None) -> bytes:
    """Return the channel binding of a certificate (DER): "tls-server-end-point" of RFC 5929."""
    return hashlib.sha256(certificate or b"").digest()


def _make(settings: Settings) -> Contexts:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    server.num_tickets = 0  # sessions are not resumed
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE  # the proofs cover the certificate
    if settings.tls_ca:
        _trust(server, client, settings)
    if not settings.tls_cert:
        certificate = _load_new(server)
        return Contexts(server, client, digest_of(certificate))
    try:
        for context in (server, client):
            # or it asks stdin
            context.load_cert_chain(settings.tls_cert, settings.tls_key or None, password="")
        with open(settings.tls_cert, "rb") as file:  # noqa: PTH123 (a path as the operator wrote it)
            certificate = ssl.PEM_cert_to_DER_cert(_first(file.read().decode()))
    except (OSError, ValueError) as exc:
        raise SettingsError(
            f"tls_cert {settings.tls_cert!r} and tls_key {settings.tls_key!r} cannot be used: "
            f"{exc}; they must be PEM files that belong together, the key without a passphrase"
        ) from exc
    return Contexts(server, client, digest_of(certificate))


def _trust(server: ssl.SSLContext, client: ssl.SSLContext, settings: Settings) -> None:
    """Have both sides show certificates of the operator's authority."""
    try:
        for context in (server, client):
            context.load_verify_locations(settings.tls_ca)
    except (OSError, ValueError) as exc:
        raise SettingsError(
            f"tls_ca {settings.tls_ca!r} cannot be used: {exc}; it must be a PEM file"
        ) from exc
    server.verify_mode = ssl.CERT_REQUIRED
    client.verify_mode = ssl.CERT_REQUIRED
    client.check_hostname = True


def _first(text: str) -> str:
    """Return the first certificate of a PEM file: the server's own; its issuers follow."""
    end = "-----END CERTIFICATE-----"
    start = text.find("-----BEGIN CERTIFICATE-----")
    end_at = text.find(end)
    if start < 0 or end_at < start:
        raise ValueError("there is no certificate in it")
    return text[start : end_at + len(end)] + "\n"


def _load_new(context: ssl.SSLContext) -> bytes:
    """Load a new key and its certificate into the context; return the certificate (DER)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pdrelay side channel")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))  # it ends with the process
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    # The ssl module loads files only; this one is in memory and has no name.
    file = os.memfd_create("pdrelay-certificate")
    try:
        os.write(file, secret + certificate.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return certificate.public_bytes(serialization.Encoding.DER)
