"""A client of a running router's routes for operators: its requests and answers."""

import argparse
import asyncio
import json
import re
import sys
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, cast

import httpx

from pdrelay_proxy.console.port_owners import port_owners, why_not_of
from pdrelay_proxy.console.router_access import read_access
from pdrelay_proxy.console.tables import in_lines, printable
from pdrelay_proxy.core.one_line import shortened
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.fair_timeout import FairTimeout
from pdrelay_proxy.io.files import LOCAL_KEY_FILE

Json: TypeAlias = dict[str, Any]
_PORTS: Final = {"http": 80, "https": 443}
# the reason of a refusal in the format of vLLM's demo, which has none
_REASON: Final = "x-pdrelay-reason"
_LARGEST_BODY: Final = 64 << 20  # bytes of an answer: ten thousand engines have megabytes


class CommandFailed(Exception):
    """The command failed; the message says why, in one sentence."""


def run_command(
    name: str, args: argparse.Namespace, answer: "Callable[[RouterClient], str]"
) -> int:
    """Print an answer; return the exit code: 0 done, 1 failed, 2 a wrong request."""
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
        """Read flags and environment; raises ConfigError: no key, a wrong file, or a conflict."""
        self.url, key, tls = read_access(args)
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
            FairTimeout(self._timeout_s),
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
