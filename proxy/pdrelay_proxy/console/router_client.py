"""A client of a running router's routes for operators: its address, its certificate, and its
answers.
"""

import argparse
import asyncio
import json
import os
import re
import ssl
import sys
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

import httpx

from pdrelay_proxy.console.flag_values import seconds, server_url
from pdrelay_proxy.console.port_owners import port_owners, why_not_of
from pdrelay_proxy.console.tables import in_lines, printable, shortened
from pdrelay_proxy.core.admission.keys import outbound_key
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.files import LOCAL_KEY_FILE, load_chain, read_text

Json: TypeAlias = dict[str, Any]
ROUTER_VARIABLE: Final = "PDRELAY_ROUTER"
PIN_VARIABLE: Final = "PDRELAY_ROUTER_PIN"
KEY_VARIABLE: Final = "ADMIN_API_KEY"
_PORTS: Final = {"http": 80, "https": 443}
_THIS_MACHINE: Final = ("127.0.0.1", "localhost", "::1")
# the reason of a refusal in the format of vLLM's demo, which has none
_REASON: Final = "x-pdrelay-reason"
_LARGEST_BODY: Final = 64 << 20  # bytes of an answer: ten thousand engines have megabytes
_TIMEOUT_S: Final = 10.0
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class CommandFailed(Exception):
    """The command failed; the message says why, in one sentence."""


def run_command(
    name: str, args: argparse.Namespace, answer: "Callable[[RouterClient], str]"
) -> int:
    """Print a command's answer; return the exit code: 0 done, 1 failed, 2 the request was
    invalid.
    """
    try:
        with RouterClient(args) as router:
            sys.stdout.write(printable(_read(router, answer)))
    except (CommandFailed, ConfigError) as exc:
        sys.stderr.write(f"pdrelay {name}: {printable(in_lines(shortened(str(exc))))}\n")
        return 2 if isinstance(exc, ConfigError) else 1
    return 0


def _read(router: "RouterClient", answer: "Callable[[RouterClient], str]") -> str:
    """Format an answer for people; raises CommandFailed if fields are missing or of other types."""
    try:
        return answer(router)
    # ``answer`` expects a router's fields: another server, or a router of another version, has
    # others. OSError: a number of seconds beyond any date.
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, OSError) as exc:
        text = (
            f"{router.url} answers something else than a router does ({type(exc).__name__}: {exc})"
        )
        raise CommandFailed(text) from exc


class RouterClient:
    """A client of the admin routes. httpx is imported here alone in the console."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Read flags and environment; raises ConfigError: no key, a wrong file, or flags that
        conflict.
        """
        self.url, key, tls = _read_access(args)
        headers = {
            b"x-api-key": key.text.encode(errors="surrogateescape"),
            b"accept-encoding": b"identity",
        }
        self._key_owner = key.owner
        limits = httpx.Limits(max_keepalive_connections=0)  # a connection for each request
        self._client = httpx.AsyncClient(
            headers=headers, timeout=None, trust_env=False, verify=tls, limits=limits
        )
        self._extensions = {} if args.server_name is None else {"sni_hostname": args.server_name}
        self._timeout_s: float = args.timeout
        self._runner = asyncio.Runner()

    def __enter__(self) -> "RouterClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def request(self, path: str, body: Mapping[str, object] | None = None) -> Json:
        """Get, or post a body, and return the answer."""
        try:
            response, content = self._runner.run(self._exchange(path, body))
        except TimeoutError as exc:
            raise CommandFailed(
                f"{self.url} gave no whole answer within {self._timeout_s:g} s (--timeout)"
            ) from exc
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as exc:
            reason = str(exc) or type(exc).__name__
            text = f"the router at {self.url} cannot be asked: {reason}"
            if match := re.search(r"certificate verify failed: (.+?) \(_ssl", reason):
                text = (
                    f"the certificate of {self.url} is not trusted ({match[1]}): see --ca, --pin "
                    f"and --server-name"
                )
            raise CommandFailed(text) from exc
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as exc:
            raise CommandFailed(
                f"{self.url} answers {response.status_code} without JSON: is it a router?"
            ) from exc
        if response.status_code != 200:
            text = _error_text(answer) or f"the router answers with status {response.status_code}"
            reason = response.headers.get(_REASON)
            raise CommandFailed(f"{text.rstrip('.')}: {reason}" if reason else text)
        if not isinstance(answer, dict):
            raise CommandFailed(f"{self.url} answers something else than a router does")
        return cast("Json", answer)

    async def _exchange(
        self, path: str, body: Mapping[str, object] | None
    ) -> tuple[httpx.Response, bytes]:
        """Read a whole answer within one timeout; httpx's own timeouts are for single reads."""
        method = "GET" if body is None else "POST"
        content = bytearray()
        # before each connection: the router may end while a command waits
        if self._key_owner is not None:
            _check_listener(self.url, self._key_owner)
        async with (
            asyncio.timeout(self._timeout_s),
            self._client.stream(
                method, self.url + path, json=body, extensions=self._extensions
            ) as response,
        ):
            # undecoded: some KB of nested gzip unpack to many GB
            async for piece_read in response.aiter_raw():
                content += piece_read
                if len(content) > _LARGEST_BODY:
                    raise CommandFailed(
                        f"{self.url} answers more than {_LARGEST_BODY} bytes: is it a router?"
                    )
        return response, bytes(content)


def _error_text(answer: object) -> str:
    """Return the message in an error, which has one of two shapes."""
    if not isinstance(answer, dict):
        return ""
    error = cast("Json", answer)
    inner: object = error.get("error")
    message = cast("Json", inner).get("message") if isinstance(inner, dict) else inner
    return str(error.get("detail") or message or "")


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
class _Key:
    """The admin key."""

    text: str = field(repr=False)
    # send it to this user's processes alone; None: to whatever the URL names
    owner: int | None = None


def _read_access(args: argparse.Namespace) -> tuple[str, _Key, ssl.SSLContext]:
    """Return the router's URL without a slash at its end, the key, and the TLS context for its
    certificate.
    """
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


def _read_key(file: str | None, url: str) -> _Key:
    """Return the admin key, which is never an argument: ps shows those.

    Raises ConfigError.
    """
    if file is not None:
        return _Key(outbound_key(read_text(file), file))
    if key := os.environ.get(KEY_VARIABLE, ""):
        return _Key(key)
    # only a router of this machine accepts it
    if LOCAL_KEY_FILE.is_file() and urllib.parse.urlsplit(url).hostname in _THIS_MACHINE:
        text = outbound_key(read_text(str(LOCAL_KEY_FILE)), str(LOCAL_KEY_FILE))
        return _Key(text, LOCAL_KEY_FILE.stat().st_uid)
    raise ConfigError(
        f"no admin key: set {KEY_VARIABLE} in the environment, or name a file with it "
        f"(--key-file); pdrelay up keeps "
        f"its own in {LOCAL_KEY_FILE}, and commands in the same folder find it"
    )


def _check_listener(url: str, user: int) -> None:
    """Raise CommandFailed unless one user owns all listeners of the router's port: others may take
    a free port.
    """
    parts = urllib.parse.urlsplit(url)
    port = parts.port or _PORTS[parts.scheme]
    if why := why_not_of(user, port, port_owners(port)):
        raise CommandFailed(
            f"the key in {LOCAL_KEY_FILE} is not shown to {url}, as {why}: if it is your router, "
            f"add --key-file "
            f"{LOCAL_KEY_FILE}"
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
