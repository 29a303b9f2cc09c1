"""What an operator may choose: one line for each, read by the command line and by the configuration file."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

from xpyd_proxy.core.address import EXPECTED
from xpyd_proxy.core.fleet.target import Target
from xpyd_proxy.core.http.address_allowlist import EXPECTED as ALLOWED
from xpyd_proxy.core.http.address_allowlist import AllowList
from xpyd_proxy.errors import AddressError
from xpyd_proxy.settings import ClientKvParams, LogFormat, LogLevel, Mode, PolicyName

_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+")


@dataclass(frozen=True, slots=True)
class Kind:
    """How one sort of value is written, as an argument and in TOML."""

    read: Callable[[str], object]  # raises ValueError with a sentence that names the text and what would be right
    written: type | tuple[type, ...]  # what TOML gives for it
    choices: tuple[str, ...] = ()
    metavar: str | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """A setting that can be chosen; its name is that of the field in Settings, and the key in the file."""

    name: str
    kind: Kind
    help: str  # with its unit
    flag: str = ""  # if it is not the name, without _s and with hyphens
    many: bool = False  # a list, in the file; an argument that may be repeated
    live: bool = False  # takes effect when the file is read again; the others need a restart

    @property
    def argument(self) -> str:
        """The flag."""
        return self.flag or "--" + self.name.removesuffix("_s").replace("_", "-")


def _address(text: str) -> str:
    try:
        Target.parse(text)
    except AddressError as exc:
        raise ValueError(str(exc)) from exc
    return text


def _place(text: str) -> str:
    AllowList.parse((text,))
    return text


def _text(text: str) -> str:
    if text:
        return text
    raise ValueError("it is empty: leave it out or write a value")


def _host(text: str) -> str:
    bare = text.removeprefix("[").removesuffix("]")
    if text == "*" or _HOST_NAME.fullmatch(bare):
        return bare
    raise ValueError(f"{text!r} is not the name of a host: write it without scheme and port, or * for all")


def _url(text: str) -> str:
    if text.startswith(("http://", "https://")):
        return text
    raise ValueError(f"{text!r} is not a URL: write http://host:port or https://host:port")


def _store(text: str) -> str:
    kind, _, where = text.partition(":")
    if urlsplit(text).password is not None:
        raise ValueError("a store's URL is shown by ps: put its password into the environment as XPYD_REDIS_PASSWORD")
    if text == "memory" or (where and kind in ("file", "kubernetes", "redis", "rediss", "unix")):
        return text
    raise ValueError(f"{text!r} is not a store: write memory, file:PATH, kubernetes:CONFIGMAP or redis://host:port/0")


def _port(text: str) -> int:
    return _whole(text, 0, 65535, "a port: write a number from 0 to 65535")


def _bytes(text: str) -> int:
    return _whole(text, 1, 1 << 62, "a size: write a whole number of bytes, 1 or more")


def _count(text: str) -> int:
    return _whole(text, 1, 1 << 62, "a count: write a whole number, 1 or more")


def _workers(text: str) -> int:
    return _whole(text, 1, 64, "a number of workers: write one from 1 to 64")


def _natural(text: str) -> int:
    return _whole(text, 0, 1 << 62, "a count: write a whole number, 0 or more")


def _whole_seconds(text: str) -> int:
    return _whole(text, 1, 1 << 31, "a time: write a whole number of seconds, 1 or more")


def _retries(text: str) -> int:
    return _whole(text, 0, 10, "a number of retries: write one from 0 to 10")


def _priority(text: str) -> int:
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= 9:
        return int(text)
    raise ValueError(f"{text!r} is not a priority: write a whole number of at most 9 digits, lower for more urgent")


def _whole(text: str, least: int, most: int, right: str) -> int:
    if text.isascii() and text.isdigit() and least <= int(text[:20]) <= most and len(text) <= 20:
        return int(text)
    raise ValueError(f"{text!r} is not {right}")


def _seconds(text: str) -> float:
    return _number(text, "a time: write a number of seconds above 0")


def _rate(text: str) -> float:
    return _number(text, "a rate: write a number of requests a second, above 0")


def _share(text: str) -> float:
    number = _number(text, right := "a share: write a number above 0, at most 1")
    if number <= 1:
        return number
    raise ValueError(f"{text!r} is not {right}")


def _grace(text: str) -> float:
    return 0.0 if text == "0" else _number(text, "a time: write a number of seconds, 0 or more")


def _number(text: str, right: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if 0 < number < float("inf"):
        return number
    raise ValueError(f"{text!r} is not {right}")


def one_of(choices: type[StrEnum]) -> Kind:
    """One of the values of an enum."""

    def read(text: str) -> StrEnum:
        if text in tuple(choices):
            return choices(text)
        raise ValueError(f"invalid choice: {text!r} (choose from {', '.join(choices)})")

    return Kind(read, str, tuple(choices))


def _switch(text: str) -> bool:
    if text in ("true", "false"):
        return text == "true"
    raise ValueError(f"{text!r} is not a switch: write true or false")


PLACE: Final = Kind(_place, str, metavar="NETWORK")
ADDRESS: Final = Kind(_address, str, metavar="URL")
TEXT: Final = Kind(_text, str, metavar="NAME")
URL: Final = Kind(_url, str, metavar="URL")
SELECTOR: Final = Kind(_text, str, metavar="SELECTOR")
STORE: Final = Kind(_store, str, metavar="STORE")
HOST: Final = Kind(_host, str, metavar="HOST")
PATH: Final = Kind(_text, str, metavar="FILE")
PORT: Final = Kind(_port, int)
BYTES: Final = Kind(_bytes, int, metavar="N")
COUNT: Final = Kind(_count, int, metavar="N")
WORKERS: Final = Kind(_workers, int, metavar="N")
NATURAL: Final = Kind(_natural, int, metavar="N")
PRIORITY: Final = Kind(_priority, int, metavar="N")
RETRIES: Final = Kind(_retries, int, metavar="N")
SECONDS: Final = Kind(_seconds, (int, float), metavar="S")
WHOLE_SECONDS: Final = Kind(_whole_seconds, int, metavar="S")
GRACE: Final = Kind(_grace, (int, float), metavar="S")
SHARE: Final = Kind(_share, (int, float), metavar="SHARE")
RATE: Final = Kind(_rate, (int, float), metavar="N")
SWITCH: Final = Kind(_switch, bool, ("true", "false"))

OPTIONS: Final[Sequence[Option]] = (
    Option("prefill", ADDRESS, f"addresses of prefill engines: {EXPECTED}", many=True, live=True),
    Option("decode", ADDRESS, "the same for decode", many=True, live=True),
    Option("host", TEXT, "interface to listen on"),
    Option("allow_unauthenticated", SWITCH, "serve others than this machine without keys"),
    Option("allowed_hosts", HOST, "more names that clients may call the router by, * for all", many=True),
    Option("port", PORT, "TCP port to listen on, 0 for any free one"),
    Option("workers", WORKERS, "processes that serve together, as one router; above 1 on Linux only"),
    Option("model", TEXT, "model that an engine added at run time must serve (default: any)"),
    Option(
        "instances_allow",
        PLACE,
        f"where engines may be added: {ALLOWED} (default: loopback and private networks)",
        many=True,
    ),
    Option(
        "client_kv_params", one_of(ClientKvParams), "refuse a request that carries kv_transfer_params, or strip them"
    ),
    Option(
        "mode",
        one_of(Mode),
        "pull: one leg after the other; push: both at once; auto: as each prefill engine says",
    ),
    Option("retries", RETRIES, "legs of one request that may fail before the client is told", live=True),
    Option("max_body_bytes", BYTES, "bytes of a request body"),
    Option("connect_timeout_s", SECONDS, "seconds to open a connection to an engine"),
    Option("prefill_timeout_s", SECONDS, "seconds for a whole prefill leg", live=True),
    Option("first_token_timeout_s", SECONDS, "seconds from a streamed decode leg to its first event", live=True),
    Option("idle_timeout_s", SECONDS, "seconds a stream may be silent between two pieces", live=True),
    Option("total_timeout_s", SECONDS, "seconds for an answer that is not streamed, with all retries", live=True),
    Option("client_timeout_s", SECONDS, "seconds in which a client must read some of its answer"),
    Option("head_timeout_s", SECONDS, "seconds in which the head of a request must come"),
    Option("body_timeout_s", SECONDS, "seconds in which its body must come, and one more for each 16 KiB of it"),
    Option("max_connections", COUNT, "connections of clients; more are answered with 503 and closed"),
    Option("max_connections_per_address", COUNT, "the same of one address; not behind a proxy (default: no limit)"),
    Option("handoff_timeout_s", SECONDS, "seconds from a prefill answer in which a decode leg may go out", live=True),
    Option("stream_timeout_s", SECONDS, "seconds for a streamed one", live=True),
    Option("min_prompt_chars", NATURAL, "a prompt whose JSON has fewer bytes is served by one engine", live=True),
    Option("alone_without_prefill", SWITCH, "serve alone while there is no prefill engine", live=True),
    Option("reuse_tokens", SWITCH, "have chats rendered and tokenized by the prefill engine only", live=True),
    Option("resume", SWITCH, "go on with a stream that breaks off, on another decode engine", live=True),
    Option("drain_grace_s", GRACE, "seconds after SIGTERM in which new requests are still served", live=True),
    Option("shutdown_timeout_s", WHOLE_SECONDS, "seconds that requests in flight get after that", live=True),
    Option("api_keys_file", PATH, "keys that clients must show, one name:key a line", live=True),
    Option("prefill_api_key_file", PATH, "file with the key that prefill engines want", live=True),
    Option("decode_api_key_file", PATH, "the same for decode engines", live=True),
    Option("cache_salt_per_key", SWITCH, "set cache_salt by the client's key: no key can probe another's prefix cache"),
    Option("server_timing", SWITCH, "answer with Server-Timing: the engines of a request and their milliseconds"),
    Option("open_metrics", SWITCH, "show /, /status.json and /metrics without a key where clients need one"),
    Option("forward_client_key", SWITCH, "show engines whose pool has no key the Authorization of the client"),
    Option("max_concurrency", COUNT, "requests that are served at the same time; more wait", live=True),
    Option("max_queue", NATURAL, "requests that wait; more are refused", live=True),
    Option("max_queue_wait_s", SECONDS, "seconds that a request waits at most", live=True),
    Option("max_held_bytes", BYTES, "bytes of the bodies of all requests that are served or wait", live=True),
    Option("max_rate", RATE, "requests a second of all clients", live=True),
    Option("max_key_concurrency", COUNT, "requests of one key that are served or wait", live=True),
    Option("max_key_rate", RATE, "requests a second of one key", live=True),
    Option("min_priority", PRIORITY, "most urgent priority of a client whose key has none of its own", live=True),
    Option("tls_cert", PATH, "PEM file with the router's certificate, to serve https"),
    Option("tls_key", PATH, "PEM file with its private key"),
    Option("tls_client_ca", PATH, "PEM file; clients must show a certificate of these authorities"),
    Option("engine_ca", PATH, "PEM file with the authorities of https engines (default: the system's)"),
    Option("engine_cert", PATH, "PEM file with the certificate that the router shows to engines"),
    Option("engine_key", PATH, "PEM file with its private key"),
    Option("prefill_policy", one_of(PolicyName), "how the engine of the prefill leg is chosen"),
    Option("decode_policy", one_of(PolicyName), "the same for decode"),
    Option("load_reports", SWITCH, "ask prefill engines how busy they are, if their policy cares"),
    Option("retry_share", SHARE, "retries of all requests together, as a share of the requests"),
    Option("retry_floor", RATE, "retries a second that are granted however few requests there are"),
    Option("probe_interval_s", GRACE, "seconds between two probes of an engine; 0: none"),
    Option("hung_timeout_s", SECONDS, "seconds without an answer to a probe after which requests there are given up"),
    Option("break_after", COUNT, "requests in a row that fail until an engine counts as broken"),
    Option("break_probes", COUNT, "probes in a row that fail, for the same"),
    Option("break_share", SHARE, "share of an engine's requests that fail, for the same"),
    Option("break_window_s", SECONDS, "seconds in which break_share is looked at"),
    Option("break_window_least", COUNT, "requests in them below which break_share says nothing"),
    Option("rest_s", SECONDS, "seconds before a broken engine gets one request again; doubled every time"),
    Option("rest_most_s", SECONDS, "seconds that this may become at most"),
    Option("kubernetes_selector", SELECTOR, "label selector of the pods that are engines, such as app=xpyd"),
    Option("kubernetes_namespace", TEXT, "where they and the store's ConfigMap are (default: where the router is)"),
    Option("store", STORE, "where added engines are kept: memory, file:PATH, kubernetes:CONFIGMAP or redis://..."),
    Option("drain_patience_s", SECONDS, "seconds without a request after which a prefill engine counts as drained"),
    Option("log_level", one_of(LogLevel), "what the log shows", live=True),
    Option("log_format", one_of(LogFormat), "lines for people, or one JSON object for each event"),
    Option("otlp_endpoint", URL, "where spans go, OTLP over HTTP (default: OTEL_EXPORTER_OTLP_ENDPOINT, else nowhere)"),
)
