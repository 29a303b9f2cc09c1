"""The operator's files, read as a whole; an error is one sentence."""

import functools
import logging
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Final

from pdrelay_proxy.core.admission.keys import Keys, outbound_key
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.settings import Settings

logger = logging.getLogger(__name__)
# Where `pdrelay up` keeps the admin key of its router, in the folder it runs in; commands for a
# router look there.
LOCAL_KEY_FILE: Final = Path(".pdrelay/admin-key")


def read_text(path: str) -> str:
    """Read a file; raises ConfigError if it is missing, not readable, or not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not UTF-8 text") from exc


def client_keys(settings: Settings) -> Keys | None:
    """Read the keys that clients must show; None: none are wanted. Raises ConfigError."""
    path = settings.api_keys_file
    if path is None:
        return None
    keys = Keys.parse(read_text(path), path)
    if not keys.is_whole:
        logger.warning(
            "%s: the last line has no line break, as a file that is being written: end it with one",
            path,
        )
    return keys


def engine_keys(settings: Settings) -> dict[Role, str]:
    """Read the keys for engines, from their files or else the environment; raises ConfigError."""
    chosen = {
        Role.PREFILL: (settings.prefill_api_key_file, settings.prefill_api_key),
        Role.DECODE: (settings.decode_api_key_file, settings.decode_api_key),
    }
    keys: dict[Role, str] = {}
    for role, (path, key) in chosen.items():
        if path is not None:
            keys[role] = outbound_key(read_text(path), path)
        elif key is not None:
            keys[role] = outbound_key(key, f"the key for {role} engines in the environment")
    return keys


def operator_key(settings: Settings) -> str | None:
    """Read the key of operators, from its file or else the environment; None: there is none.

    Raises ConfigError. A file may have two lines, while a new key replaces an old one.
    """
    path = settings.admin_key_file
    return settings.admin_key if path is None else _replaceable_key(path)


def join_key(settings: Settings) -> str | None:
    """Read the key by which engines join; None: there is none.

    Raises ConfigError, also if it is the admin key.
    """
    path = settings.join_key_file
    if path is None:
        return None
    key = _replaceable_key(path)
    if not set(key.split("\n")).isdisjoint((operator_key(settings) or "").split("\n")):
        raise ConfigError(
            f"{path} has the admin key: the join key is another one, for hosts that may do less"
        )
    return key


def _replaceable_key(path: str) -> str:
    text = read_text(path)
    first, _, second = text.strip().partition("\n")
    if not second:
        return outbound_key(text, path)
    return f"{outbound_key(first, path)}\n{outbound_key(second, path)}"


def server_tls(settings: Settings) -> ssl.SSLContext | None:
    """Build the TLS context of the router's https port; None: it serves http.

    Raises ConfigError: a file is wrong, or two do not belong together.
    """
    cert = settings.tls_cert
    key = settings.tls_key
    authorities = settings.tls_client_ca
    if cert is None or key is None:
        if (cert, key, authorities) != (None, None, None):
            raise ConfigError("tls_cert and tls_key belong together, and tls_client_ca needs both")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_chain(context, cert, key)
    if authorities is not None:
        _load_authorities(context, authorities)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def admin_tls(settings: Settings) -> ssl.SSLContext | None:
    """Build the TLS context of the admin port; raises ConfigError as ``server_tls`` does."""
    return None if settings.admin_port is None else server_tls(of_admin_port(settings))


def of_admin_port(settings: Settings) -> Settings:
    """Return the same without the authorities: the admin port asks for no certificates."""
    return replace(settings, tls_client_ca=None)


def renew_server_tls(context: ssl.SSLContext, settings: Settings) -> None:
    """Use the present content of the same files for new connections.

    Raises ConfigError, and then changes nothing. New authorities of clients are trusted; removed
    ones stay trusted until the router is restarted.
    """
    if settings.tls_cert is not None and settings.tls_key is not None:
        server_tls(settings)  # a trial, on another context
        load_chain(context, settings.tls_cert, settings.tls_key)
        if settings.tls_client_ca is not None:
            _load_authorities(context, settings.tls_client_ca)


def renew_engine_tls(context: ssl.SSLContext, settings: Settings) -> None:
    """Use the present content of the same files for new connections to engines; otherwise as
    ``renew_server_tls``.
    """
    engine_tls(settings)  # a trial, on another context
    if settings.engine_ca is not None:
        _load_authorities(context, settings.engine_ca)
    if settings.engine_cert is not None and settings.engine_key is not None:
        load_chain(context, settings.engine_cert, settings.engine_key)


def engine_tls(settings: Settings) -> ssl.SSLContext:
    """Build the TLS context for https engines; raises ConfigError as ``server_tls`` does."""
    if settings.engine_ca is None and settings.engine_cert is None and settings.engine_key is None:
        return _system_tls()
    if settings.engine_ca is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # these authorities and no others
        _load_authorities(context, settings.engine_ca)
    if (settings.engine_cert is None) != (settings.engine_key is None):
        raise ConfigError("engine_cert and engine_key belong together")
    if settings.engine_cert is not None and settings.engine_key is not None:
        load_chain(context, settings.engine_cert, settings.engine_key)
    return context


@functools.cache
def _system_tls() -> ssl.SSLContext:
    """Return the context that trusts the system's authorities and has no certificate; loading it
    takes 50 ms, and it is never changed.
    """
    return ssl.create_default_context()


def load_chain(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Load a certificate and its key; raises ConfigError."""
    read_text(cert)
    read_text(key)
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # never ask at a terminal
    except (ssl.SSLError, OSError, ValueError) as exc:
        raise ConfigError(
            f"{cert} and {key} are not a certificate and its private key in PEM, unencrypted"
        ) from exc


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    read_text(path)
    try:
        context.load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError) as exc:
        raise ConfigError(f"{path} has no certificates of authorities in PEM") from exc
