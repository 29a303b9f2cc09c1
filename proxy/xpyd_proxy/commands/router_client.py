"""A client of a running router's routes for operators: where it is, how it is trusted, and its answers."""

import argparse
import os
import re
import ssl
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, cast

import httpx

from xpyd_proxy.commands.tables import printable
from xpyd_proxy.core.admission.keys import outbound_key
from xpyd_proxy.errors import ConfigError
from xpyd_proxy.io.files import load_chain, read_text

Json: TypeAlias = dict[str, Any]
ROUTER_VARIABLE: Final = "XPYD_ROUTER"
PIN_VARIABLE: Final = "XPYD_ROUTER_PIN"
KEY_VARIABLE: Final = "ADMIN_API_KEY"
_WORKERS: Final = "x-xpyd-workers"  # of a 404: of how many processes this one is
_TRIES: Final = 8  # connections for each worker: one in 3,000 is missed
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class CommandFailed(Exception):
    """The command could not be done; the message says why, in one sentence."""


class UnknownHere(CommandFailed):
    """One worker of a router does not know what was asked for; ``workers``: how many there are."""

    def __init__(self, said: str, workers: int) -> None:
        super().__init__(said)
        self.workers = workers


def run_command(name: str, args: argparse.Namespace, answer: "Callable[[RouterClient], str]") -> int:
    """Print what a command answers; return the exit code: 0 done, 1 not done, 2 it could not be asked for like this."""
    try:
        with RouterClient(args) as router:
            sys.stdout.write(printable(answer(router)))
    except (CommandFailed, ConfigError) as exc:
        sys.stderr.write(f"xpyd {name}: {printable(str(exc))}\n")
        return 2 if isinstance(exc, ConfigError) else 1
    return 0


class RouterClient:
    """A client of the admin routes. httpx and its exceptions stop here."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Read what flags and environment name; raises ConfigError: no key, a wrong file, or flags that clash."""
        self._url, key, tls = _read_access(args)
        headers = {b"x-api-key": key.encode()}
        limits = httpx.Limits(max_keepalive_connections=0)  # a connection for each question
        self._client = httpx.Client(headers=headers, timeout=args.timeout, trust_env=False, verify=tls, limits=limits)
        self._extensions = {} if args.server_name is None else {"sni_hostname": args.server_name}

    def __enter__(self) -> "RouterClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> Json:
        """Get, or post a body, and return the answer."""
        method = "GET" if body is None else "POST"
        try:
            response = self._client.request(method, self._url + path, json=body, extensions=self._extensions)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            reason = str(exc) or type(exc).__name__
            said = f"the router at {self._url} cannot be asked: {reason}"
            if found := re.search(r"certificate verify failed: (.+?) \(_ssl", reason):
                said = f"the certificate of {self._url} is not trusted ({found[1]}): see --ca, --pin and --server-name"
            raise CommandFailed(said) from exc
        try:
            found = response.json()
        except ValueError as exc:
            raise CommandFailed(f"{self._url} answers {response.status_code} without JSON: is it a router?") from exc
        workers = response.headers.get(_WORKERS, "")
        if response.status_code == 404 and workers.isdigit():
            raise UnknownHere(_said(found), int(workers))
        if response.status_code != 200:
            raise CommandFailed(_said(found) or f"the router answers with status {response.status_code}")
        if not isinstance(found, dict):
            raise CommandFailed(f"{self._url} answers something else than a router does")
        return cast("Json", found)

    def ask_any_worker(self, path: str) -> Json:
        """Get what only one worker of the router knows: each connection is one worker's, and nobody chooses whose."""
        asked, most = 0, 1
        while True:
            try:
                return self.ask(path)
            except UnknownHere as exc:
                asked, most = asked + 1, 1 if exc.workers == 1 else _TRIES * exc.workers
                if asked >= most:
                    raise


def _said(found: object) -> str:
    """Find the words in an error, which has one of two shapes."""
    if not isinstance(found, dict):
        return ""
    error = cast("Json", found)
    inner: object = error.get("error")
    said = cast("Json", inner).get("message") if isinstance(inner, dict) else inner
    return str(error.get("detail") or said or "")


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


def _read_access(args: argparse.Namespace) -> tuple[str, str, ssl.SSLContext]:
    """Return the router's URL without a slash at its end, the key, and what its certificate is checked with."""
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
    return url, key, tls


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
