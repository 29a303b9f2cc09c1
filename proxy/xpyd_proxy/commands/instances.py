"""``xpyd instances``: the engines of a running router, seen and changed from a terminal."""

import argparse
import json
import os
import re
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import httpx

from xpyd_proxy.core.admission.keys import outbound_key
from xpyd_proxy.errors import ConfigError
from xpyd_proxy.io.files import load_chain, read_text

Json: TypeAlias = dict[str, Any]
_COLUMNS: Final = (
    *("id", "role", "address", "rank", "state", "in_flight", "for", "models", "version", "mode"),
    *("source", "revision", "why"),
)
_POLL_S: Final = 0.5
ROUTER_VARIABLE: Final = "XPYD_ROUTER"
PIN_VARIABLE: Final = "XPYD_ROUTER_PIN"
KEY_VARIABLE: Final = "ADMIN_API_KEY"
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class CommandFailed(Exception):
    """The command could not be done; the message says why, in one sentence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    _add_access_arguments(parser)
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds for its answer (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the router's own JSON")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=type(parser))
    verbs.add_parser("list", help="who is there").set_defaults(verb=_list)
    add = verbs.add_parser("add", help="send requests to one more engine, which must answer")
    add.add_argument("type", choices=["prefill", "decode"])
    add.add_argument("address", metavar="HOST:PORT", help="also HOST:PORT#dp=N for N data-parallel ranks")
    add.set_defaults(verb=_add)
    changes = {
        "remove": "forget engines at once; drain them first if they are to be stopped",
        "drain": "send them nothing new, and say so when they have nothing left",
        "undrain": "send them requests again",
    }
    for verb, text in changes.items():
        one = verbs.add_parser(verb, help=text)
        one.add_argument("id", nargs="+", metavar="ID", help="such as decode-0: see list")
        one.set_defaults(verb=_change, name=verb)
        if verb == "drain":
            one.add_argument("--wait", type=float, default=0.0, metavar="S", help="seconds to wait until it is drained")
    explain = verbs.add_parser("explain", help="which engines a request would go to, and what each would get")
    explain.add_argument("file", metavar="FILE", help="the body of the request; - reads it from standard input")
    explain.add_argument("--path", default="/v1/completions", help="(%(default)s)")
    explain.add_argument("--session", metavar="ID", help="its X-Session-ID")
    explain.set_defaults(verb=_explain)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do it; return the exit code: 0 done, 1 not done, 2 it could not be asked for like this."""
    verb: Callable[[_RouterClient, argparse.Namespace], str] = args.verb
    try:
        with _RouterClient(args) as router:
            sys.stdout.write(verb(router, args))
    except (CommandFailed, ConfigError) as exc:
        sys.stderr.write(f"xpyd instances: {exc}\n")
        return 2 if isinstance(exc, ConfigError) else 1
    return 0


class _RouterClient:
    """A client of the admin routes. httpx and its exceptions stop here."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Read what flags and environment name; raises ConfigError: no key, a wrong file, or flags that clash."""
        self._url, key, tls = _read_access(args)
        headers = {b"x-api-key": key.encode()}
        self._client = httpx.Client(headers=headers, timeout=args.timeout, trust_env=False, verify=tls)
        self._extensions = {} if args.server_name is None else {"sni_hostname": args.server_name}

    def __enter__(self) -> "_RouterClient":
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
        if response.status_code != 200:
            raise CommandFailed(_said(found) or f"the router answers with status {response.status_code}")
        if not isinstance(found, dict):
            raise CommandFailed(f"{self._url} answers something else than a router does")
        return cast("Json", found)


def _said(found: object) -> str:
    """Find the words in an error, which has one of two shapes."""
    if not isinstance(found, dict):
        return ""
    error = cast("Json", found)
    inner: object = error.get("error")
    said = cast("Json", inner).get("message") if isinstance(inner, dict) else inner
    return str(error.get("detail") or said or "")


def _list(router: _RouterClient, args: argparse.Namespace) -> str:
    return _shown(router.ask("/instances"), args)


def _add(router: _RouterClient, args: argparse.Namespace) -> str:
    return f"{router.ask('/instances/add', {'type': args.type, 'instance': args.address})['message']}\n"


def _change(router: _RouterClient, args: argparse.Namespace) -> str:
    answers = [router.ask(f"/instances/{args.name}", {"id": name}) for name in args.id]
    rows = [row for answer in answers for row in answer["instances"]]
    if getattr(args, "wait", 0):
        rows = _wait(router, args.id, args.wait)
    return _shown({"instances": rows}, args)


def _wait(router: _RouterClient, names: Sequence[str], seconds: float) -> list[Json]:
    """Wait until all of them are drained; one that is removed meanwhile is, too."""
    deadline = time.monotonic() + seconds
    while True:
        rows = [row for row in router.ask("/instances")["instances"] if row["id"] in names]
        left = [row for row in rows if row["state"] != "drained"]
        if not left:
            return rows
        if time.monotonic() >= deadline:
            said = ", ".join(f"{row['id']} is {row['state']} with {row['in_flight']} in flight" for row in left)
            raise CommandFailed(f"after {seconds:g} s {said}")
        time.sleep(_POLL_S)


def _explain(router: _RouterClient, args: argparse.Namespace) -> str:
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
        body = json.loads(text)
    except OSError as exc:
        raise CommandFailed(f"{args.file} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise CommandFailed(f"{args.file} is not JSON: {exc}") from exc
    headers = {} if args.session is None else {"x-session-id": args.session}
    found = router.ask("/instances/explain", {"path": args.path, "body": body, "headers": headers})
    if args.json:
        return json.dumps(found) + "\n"
    lines = [f"rule:     {found['rule']}", f"prefill:  {found['prefill'] or '-'}", f"decode:   {found['decode']}"]
    lines.append(f"prompt:   {found['prompt_bytes']} B; alone if D lacks less than {found['min_split_new_bytes']} B")
    lines += [f"alone:    {name} computes {size} B now" for name, size in found.get("lone_prompt_bytes", {}).items()]
    if bound := found.get("lone_prompt_bound"):
        lines.append(f"bound:    {bound}: streams of the decode engine that has most of it would wait for too long")
    by = found.get("cached_known_by", {})
    lines += [
        f"cached:   {size} B at {name}{f', known by {by[name]}' if name in by else ''}"
        for name, size in found["cached_bytes"].items()
    ]
    lines += [f"cached:   {count} tokens at {name}" for name, count in found.get("cached_tokens", {}).items()]
    if expected := found.get("expected_ms"):
        lines.append("expected: " + ", ".join(f"{name} {value:g} ms" for name, value in expected.items()))
    bodies = [(leg, found[f"{leg}_body"]) for leg in ("prefill", "decode")]
    lines += [f"{leg} body:\n{json.dumps(body, indent=2, ensure_ascii=False)}" for leg, body in bodies if body]
    return "\n".join(lines) + "\n"


def _shown(found: Json, args: argparse.Namespace) -> str:
    if args.json:
        return json.dumps(found) + "\n"
    table: list[tuple[str, ...]] = [_COLUMNS]
    for row in found["instances"]:
        values = {**row, "for": _duration(row["since_s"]), "models": ",".join(row["models"] or ())}
        table.append(tuple("-" if values[name] in (None, "") else str(values[name]) for name in _COLUMNS))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return "".join(line.rstrip() + "\n" for line in lines)


def _duration(seconds: float) -> str:
    """Write a duration as people read it, cut to its two largest parts."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def _add_access_arguments(parser: argparse.ArgumentParser) -> None:
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
