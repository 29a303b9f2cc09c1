"""How ``xpyd instances`` gets in: the admin key that it shows, and the certificates of a router that serves https."""

import argparse
import os
import re
import ssl
from dataclasses import dataclass
from typing import Final

from xpyd_proxy.core.admission.keys import outbound_key
from xpyd_proxy.errors import ConfigError
from xpyd_proxy.io.files import load_chain, read_text

ROUTER_VARIABLE: Final = "XPYD_ROUTER"
PIN_VARIABLE: Final = "XPYD_ROUTER_PIN"
KEY_VARIABLE: Final = "ADMIN_API_KEY"
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


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
    """Read what flags and environment name; raises ConfigError: a key is missing, a file is wrong, or flags clash."""
    url = (args.router if "://" in args.router else f"http://{args.router}").rstrip("/")
    secure = url.startswith("https://")
    for_https = ("ca", "pin", "server_name", "client_cert", "client_key")
    given = sorted(f"--{name.replace('_', '-')}" for name in for_https if getattr(args, name) is not None)
    if given and not secure:
        raise ConfigError(f"{', '.join(given)}: only a router at https:// has a certificate, and this is {url}")
    if args.pin and (args.ca or args.server_name):
        raise ConfigError("--pin trusts one certificate, of any name: leave out --ca and --server-name")
    tls = _tls(args) if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if args.key_file is not None:
        key = outbound_key(read_text(args.key_file), args.key_file)
    elif not (key := os.environ.get(KEY_VARIABLE, "")):  # never an argument: those are visible in ps
        raise ConfigError(f"set {KEY_VARIABLE} in the environment to the key of the router, or name a file: --key-file")
    return Access(url, key, tls, args.server_name)


def _tls(args: argparse.Namespace) -> ssl.SSLContext:
    pin = args.pin or (None if args.ca or args.server_name else os.environ.get(PIN_VARIABLE))
    if path := pin or args.ca:
        context, pem = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), read_text(path)  # these authorities and no others
        if pin:  # the first certificate of a chain itself; whose name it has makes no difference then
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
