"""Where a running router is, and what proves who it and the operator are: flags and environment."""

import argparse
import os
import re
import ssl
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pdrelay_proxy.console.flag_values import seconds, server_url
from pdrelay_proxy.core.admission.keys import outbound_key
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.files import LOCAL_KEY_FILE, load_chain, read_text

ROUTER_VARIABLE: Final = "PDRELAY_ROUTER"
PIN_VARIABLE: Final = "PDRELAY_ROUTER_PIN"
KEY_VARIABLE: Final = "ADMIN_API_KEY"
_THIS_MACHINE: Final = ("127.0.0.1", "localhost", "::1")
_TIMEOUT_S: Final = 10.0
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def add_access_arguments(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    """Declare and return the flags of all commands that call a router."""
    add = parser.add_argument
    router = os.environ.get(ROUTER_VARIABLE) or "http://127.0.0.1:8000"
    text = f"URL of the router (default: ${ROUTER_VARIABLE}, now {router})"
    return (
        add("--router", default=router, metavar="URL", help=text),
        add(
            "--key-file",
            metavar="FILE",
            help=f"file with the admin key (default: ${KEY_VARIABLE}, then that of pdrelay up)",
        ),
        add(
            "--ca",
            metavar="FILE",
            help="PEM file with the only authorities to trust for an https router",
        ),
        add(
            "--pin",
            metavar="FILE",
            help=(
                f"PEM file that begins with the router's exact certificate, of any name (default: "
                f"${PIN_VARIABLE})"
            ),
        ),
        add(
            "--server-name",
            metavar="NAME",
            help="name in the router's certificate, if it is not the host of the URL",
        ),
        add(
            "--client-cert",
            metavar="FILE",
            help="PEM file with a certificate for a router with --tls-client-ca",
        ),
        add("--client-key", metavar="FILE", help="PEM file with its private key"),
        add(
            "--timeout",
            type=seconds,
            default=_TIMEOUT_S,
            metavar="S",
            help=f"seconds that the router has for its whole answer (default: {_TIMEOUT_S:g})",
        ),
        add("--json", action="store_true", help="print the router's own JSON"),
    )


@dataclass(frozen=True, slots=True)
class AccessKey:
    """The admin key."""

    text: str = field(repr=False)
    # send it to this user's processes alone; None: to whatever the URL names
    owner: int | None = None


def read_access(args: argparse.Namespace) -> tuple[str, AccessKey, ssl.SSLContext]:
    """Return the router's URL, without a slash at its end, the key, and the TLS context."""
    url = server_url(args.router)
    secure = url.startswith("https://")
    for_https = ("ca", "pin", "server_name", "client_cert", "client_key")
    given_flags = sorted(
        f"--{name.replace('_', '-')}" for name in for_https if getattr(args, name) is not None
    )
    if given_flags and not secure:
        raise ConfigError(
            f"{', '.join(given_flags)}: only a router at https:// has a certificate, and this is {url}"
        )
    if args.pin and (args.ca or args.server_name):
        raise ConfigError(
            "--pin trusts one certificate, of any name: leave out --ca and --server-name"
        )
    tls = _tls(args) if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return url, _read_key(args.key_file, url), tls


def _read_key(file: str | None, url: str) -> AccessKey:
    """Return the admin key, which is never an argument: ps shows those.

    Raises ConfigError.
    """
    if file is not None:
        return AccessKey(outbound_key(read_text(file), file))
    if key := os.environ.get(KEY_VARIABLE, ""):
        return AccessKey(key)
    # only a router of this machine accepts it
    if LOCAL_KEY_FILE.is_file() and urllib.parse.urlsplit(url).hostname in _THIS_MACHINE:
        text = outbound_key(read_text(str(LOCAL_KEY_FILE)), str(LOCAL_KEY_FILE))
        return AccessKey(text, LOCAL_KEY_FILE.stat().st_uid)
    raise ConfigError(
        f"no admin key: set {KEY_VARIABLE} in the environment, or name a file with it "
        f"(--key-file); pdrelay up keeps "
        f"its own in {LOCAL_KEY_FILE}, and commands in the same folder find it"
    )


def _tls(args: argparse.Namespace) -> ssl.SSLContext:
    pin = args.pin or (None if args.ca or args.server_name else os.environ.get(PIN_VARIABLE))
    if path := pin or args.ca:
        # trust these authorities alone
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        pem = read_text(path)
        # trust the first certificate of a chain itself, whatever name it has
        if pin:
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            first = _PEM.search(pem)
            pem = first[0] if first else ""
        try:
            context.load_verify_locations(cadata=pem)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{path} has no certificate in PEM") from exc
    else:
        context = ssl.create_default_context()
    if (args.client_cert is None) != (args.client_key is None):
        raise ConfigError("--client-cert and --client-key belong together")
    if args.client_cert is not None:
        load_chain(context, args.client_cert, args.client_key)
    return context
