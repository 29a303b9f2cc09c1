"""How ``xpyd instances`` gets in: the admin key that it shows, and the certificates of a router that serves https."""

import argparse
import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROUTER_VARIABLE: Final = "XPYD_ROUTER"
PIN_VARIABLE: Final = "XPYD_ROUTER_PIN"
KEY_VARIABLE: Final = "ADMIN_API_KEY"
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class NoAccess(Exception):
    """Nothing was asked; the message says in one sentence what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a client of the admin routes needs."""

    url: str  # of the router, with its scheme and without a slash at the end
    key: str
    tls: ssl.SSLContext  # of https alone
    server_name: str | None  # that the certificate must have; None: that of the URL


def add_access_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    router = os.environ.get(ROUTER_VARIABLE) or "http://127.0.0.1:8000"
    parser.add_argument("--router", default=router, metavar="URL", help=f"the router (${ROUTER_VARIABLE}: %(default)s)")
    parser.add_argument("--key-file", metavar="FILE", help=f"file with the admin key (default: ${KEY_VARIABLE})")
    parser.add_argument("--ca", metavar="FILE", help="PEM file with the authorities of an https router, and no others")
    parser.add_argument(
        "--pin", metavar="FILE", help=f"PEM file that begins with its very certificate, of any name (${PIN_VARIABLE})"
    )
    parser.add_argument("--server-name", metavar="NAME", help="name in its certificate, if it is not that of the URL")
    parser.add_argument("--client-cert", metavar="FILE", help="PEM file with a certificate to show (--tls-client-ca)")
    parser.add_argument("--client-key", metavar="FILE", help="PEM file with its private key")


def read_access(args: argparse.Namespace) -> Access:
    """Read what the flags and the environment name.

    Raises:
        NoAccess: there is no key, a file is not what it should be, or the flags contradict each other.
    """
    url = (args.router if "://" in args.router else f"http://{args.router}").rstrip("/")
    secure = url.startswith("https://")
    given = sorted(f"--{name.replace('_', '-')}" for name in _FOR_HTTPS if getattr(args, name) is not None)
    if given and not secure:
        raise NoAccess(f"{', '.join(given)}: only a router at https:// has a certificate, and this is {url}")
    if args.pin and (args.ca or args.server_name):
        raise NoAccess("--pin trusts one certificate, of any name: leave out --ca and --server-name")
    tls = _tls(args) if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return Access(url, _key(args.key_file), tls, args.server_name)


def _key(path: str | None) -> str:
    if path is None:
        if key := os.environ.get(KEY_VARIABLE, ""):  # never an argument: those are visible in ps
            return key
        raise NoAccess(f"set {KEY_VARIABLE} in the environment to the key of the router, or name a file: --key-file")
    key = _text(path).strip()
    if key and key.isascii() and key.isprintable() and " " not in key:
        return key
    raise NoAccess(f"{path} is not a key: write one line of printable characters without spaces")


def _tls(args: argparse.Namespace) -> ssl.SSLContext:
    pin = args.pin or (None if args.ca or args.server_name else os.environ.get(PIN_VARIABLE))
    context = _pinned(pin) if pin else _authorities(args.ca)
    if (args.client_cert is None) != (args.client_key is None):
        raise NoAccess("--client-cert and --client-key belong together")
    if args.client_cert is not None:
        for path in (args.client_cert, args.client_key):
            _text(path)
        try:
            context.load_cert_chain(args.client_cert, args.client_key, password=lambda: "")  # never ask at a terminal
        except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
            pair = f"{args.client_cert} and {args.client_key}"
            raise NoAccess(f"{pair} are not a certificate and its private key in PEM, unencrypted") from exc
    return context


def _authorities(path: str | None) -> ssl.SSLContext:
    if path is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # these and no others
    _trust(context, _text(path), path)
    return context


def _pinned(path: str) -> ssl.SSLContext:
    """Trust the first certificate of a chain itself; whose name it has makes no difference then."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    first = _PEM.search(_text(path))
    _trust(context, first[0] if first else "", path)
    return context


def _trust(context: ssl.SSLContext, pem: str, path: str) -> None:
    try:
        context.load_verify_locations(cadata=pem)
    except (OSError, ValueError) as exc:
        raise NoAccess(f"{path} has no certificate in PEM") from exc


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as exc:
        raise NoAccess(f"{path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise NoAccess(f"{path} is not text") from exc


_FOR_HTTPS: Final = ("ca", "pin", "server_name", "client_cert", "client_key")
