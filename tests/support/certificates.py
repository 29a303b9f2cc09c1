"""Certificates for tests: one authority, and what it has signed, made by the openssl binary."""

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as files."""

    cert: str
    key: str


class Authority:
    """Signs certificates for 127.0.0.1, if nothing else is said."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        # Python 3.13 and newer verify strictly: an authority without a key usage is refused.
        usage = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
        self.own = self._make(name, "-x509", *usage)

    def sign(self, name: str, host: str = "IP:127.0.0.1") -> Pair:
        """Make a certificate that is good for servers and for clients."""
        extra = ("-x509", "-CA", self.own.cert, "-CAkey", self.own.key)
        return self._make(name, *extra, "-addext", f"subjectAltName={host}", "-addext", "basicConstraints=CA:FALSE")

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Return what an engine of this authority serves with, and what trusts it."""
        pair = self.sign("engine")
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(pair.cert, pair.key)
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.load_verify_locations(self.own.cert)
        return serving, trusting

    def _make(self, name: str, *extra: str) -> Pair:
        pair = Pair(str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key"))
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
        files = ("-subj", f"/CN={name}", "-keyout", pair.key, "-out", pair.cert)
        subprocess.run(["openssl", "req", *curve, *files, *extra], check=True, capture_output=True)
        return pair


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory):
    """The system's authorities, of which there is one: to read the usual ones takes longer than most tests.

    The conftest.py of a folder imports it.
    """
    folder = tmp_path_factory.mktemp("authorities")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", Authority(folder, "nobody").own.cert)
        patch.setenv("SSL_CERT_DIR", str(folder))
        yield
