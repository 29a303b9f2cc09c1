"""The choices of an operator, each declared once: type, default, kind, meaning, chart value,
SIGHUP.

The name of a field is the key in the configuration file; with hyphens and without ``_s`` it is the
flag. A feature declares its own (``features/*/settings.py``). ``known_settings.py`` has all of
them by name, ``options.py`` reads what people write, and ``helm/generate.py`` makes the chart's
schema and docs/options.md.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Final, TypeVar

from pdrelay_proxy.declarations import (
    Address,
    Bytes,
    Count,
    DnsName,
    File,
    Group,
    HeaderName,
    Host,
    Kind,
    Natural,
    Network,
    Origin,
    Port,
    Processes,
    Rate,
    Ratio,
    Retries,
    Seconds,
    SessionName,
    SomeBytes,
    SomeSeconds,
    Switch,
    WholeSeconds,
)

T = TypeVar("T")
CONNECTIONS: Final = 16384  # of clients, unless the operator sets a number


class KvTransferMode(StrEnum):
    """Who moves the KV cache: the prefill engine (push), or the decode engine (pull)."""

    AUTO = "auto"  # as each prefill engine reports in its answers
    PULL = "pull"  # always one leg after the other
    PUSH = "push"  # every prefill engine pushes; one that reports pull is an error


class LogLevel(StrEnum):
    """The lowest severity that the log shows."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """The form of the log."""

    TEXT = "text"  # lines for people
    JSON = "json"  # one object for each event


class PolicyName(StrEnum):
    """How the engine of one leg is chosen."""

    # in turn; with both legs, every prefill engine is paired with every decode engine
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"  # the less loaded of two random engines
    # the same engine for all requests of a session; without one, the least loaded
    SESSION = "session"
    # the engine that has had the longest beginning of the prompt, unless it is overloaded
    PREFIX = "prefix"


class QueueOrder(StrEnum):
    """Which waiting request of a priority gets the next free place."""

    ARRIVAL = "arrival"
    FAIR = "fair"  # one of the key that was served the fewest tokens


class OverloadStatus(StrEnum):
    """The status of requests that come while the router or all engines have no room."""

    SERVICE_UNAVAILABLE = "503"
    TOO_MANY_REQUESTS = "429"  # meshes and load balancers eject backends that answer 503


def policy_kind(names: tuple[str, ...]) -> Kind:
    """Return the kind of a policy's name; ``names``: policies that need no other package."""
    right = f"a policy: write {', '.join(names)}, or the name of one that is installed"
    return Kind(right, "POLICY", choices=names, is_open=True)


PolicyChoice = Annotated[str, policy_kind(tuple(PolicyName))]  # features add theirs

FIRST: Final = Group("what most routers need")
ENGINES: Final = Group("engines, and how a request is split between them")
HEALTH: Final = Group("health of engines")
RETRIES: Final = Group("retries")
LIMITS: Final = Group("admission and limits")
TIMEOUTS: Final = Group("timeouts")
SECURITY: Final = Group("security")
ADMIN: Final = Group("admin port")
TELEMETRY: Final = Group("logs, metrics and traces")
WORKERS: Final = Group("workers")


@dataclass(frozen=True, slots=True)
class Settings:
    """The choices, in the order of ``--help``."""

    # fmt: off
    prefill: tuple[Address, ...] = FIRST.option((),
        "addresses of the prefill engines, as host:port or http(s)://host:port",
        live=True, chart="router.discovery.prefill")
    decode: tuple[Address, ...] = FIRST.option((),
        "addresses of the decode engines, as host:port or http(s)://host:port",
        live=True, chart="router.discovery.decode")
    host: str = FIRST.option("127.0.0.1", "address to listen on", chart="listenAddress")
    port: Port = FIRST.option(8000, "TCP port to listen on; 0: the system chooses one", chart="router.port")
    api_keys_file: File | None = FIRST.option(None,
        "file with the API keys of clients, one name:key a line", live=True, chart="router.apiKeys.secretName")
    prefill_policy: PolicyChoice = FIRST.option(PolicyName.ROUND_ROBIN,
        "policy that chooses the prefill engine of a request")
    decode_policy: PolicyChoice = FIRST.option(PolicyName.ROUND_ROBIN,
        "policy that chooses the decode engine of a request")
    kv_transfer_mode: KvTransferMode = FIRST.option(KvTransferMode.AUTO,
        "pull: a request goes to the prefill engine, then to the decode engine; push: to both at once; auto: as each "
        "prefill engine says")
    reuse_kv: bool = FIRST.option(False,
        "use the KV that engines have: sets prefill_policy and decode_policy prefix, kv_events auto, return_kv and "
        "min_split_new_bytes 1500, each unless you set it")
    log_level: LogLevel = FIRST.option(LogLevel.INFO, "least severe level that is logged", live=True)

    allowed_instances: tuple[Network, ...] = ENGINES.option((),
        "networks, addresses and names at which engines may be added at run time",
        unset="loopback and private networks", chart="router.allowedInstances")
    decode_only_fallback: bool = ENGINES.option(True,
        "decode engines serve alone while there is no prefill engine; false: such requests get 503", live=True)
    min_split_new_bytes: SomeBytes = ENGINES.option(0,
        "a decode engine serves a prompt alone if its cache lacks fewer bytes than this of the prompt's JSON; also "
        "the limit for all prompts that it computes alone at a time", live=True)
    return_kv: bool = ENGINES.option(False,
        "prefill engines read the KV of earlier answers from decode engines; the connector of both needs return_kv, "
        "too")
    session_names: tuple[SessionName, ...] = ENGINES.option((),
        "headers, or body:FIELD, that name a session; they come before the built-in names",
        unset="the built-in names only")

    health_check_interval_s: SomeSeconds = HEALTH.option(5.0,
        "time between two health checks of an engine; 0: no health checks")
    health_check_failures: Count = HEALTH.option(2, "consecutive health checks that fail before an engine is ejected")
    circuit_breaker_failures: Natural = HEALTH.option(5,
        "consecutive requests that fail before an engine is ejected; 0: failed requests eject no engine")
    engine_metrics_interval_s: Seconds = HEALTH.option(15.0,
        "time between two reads of the metrics of all decode engines, which show whether KV arrives and whose cache "
        "is full; 1 or 2 with move_above")

    retries: Retries = RETRIES.option(2,
        "failed legs (requests to one engine) of a client's request that are retried before it gets the error; 0: "
        "nothing is sent twice that an engine may have read",
        live=True)
    retry_budget_ratio: Ratio = RETRIES.option(0.2,
        "limit for the retries of all requests together, as a share of the requests; one a second is always allowed")
    resume_streams: bool = RETRIES.option(False, "another decode engine continues a stream that breaks off", live=True)

    max_concurrency: Count = LIMITS.option(4096,
        "requests served at the same time; further ones wait in the queue", live=True)
    max_queue: Natural = LIMITS.option(1024, "requests that wait in the queue; further ones get 503", live=True)
    max_queue_wait_s: Seconds = LIMITS.option(30.0, "longest time in the queue; then the request gets 503", live=True)
    max_inflight_bytes: Bytes = LIMITS.option(1 << 30,
        "bodies of all requests that are served or wait, together; further ones get 503", live=True)
    max_body_bytes: Bytes = LIMITS.option(16 << 20, "body of one request; a larger one gets 413")
    max_rate: Rate | None = LIMITS.option(None,
        "requests a second of all clients together, at all routers that know each other (peers, workers); further "
        "ones get 503", live=True)
    max_key_concurrency: Count | None = LIMITS.option(None,
        "requests of one API key that are served or wait; further ones get 429", live=True)
    max_key_rate: Rate | None = LIMITS.option(None,
        "requests a second of one API key, at all routers that know each other; further ones get 429", live=True)
    max_key_tokens_per_minute: Count | None = LIMITS.option(None,
        "prompt and answer tokens a minute of one API key, at all routers that know each other; further requests get "
        "429", live=True)
    queue_order: QueueOrder = LIMITS.option(QueueOrder.ARRIVAL,
        "which request of a priority leaves the queue next; fair: one of the API key that was served the fewest "
        "tokens", live=True)
    max_connections: Count | None = LIMITS.option(None,
        "connections of clients; further ones get 503 and are closed",
        unset=f"{CONNECTIONS}, or as many as the file descriptors allow")
    overload_status: OverloadStatus = LIMITS.option(OverloadStatus.SERVICE_UNAVAILABLE,
        "status of requests for which the router or its engines have no room; 429 keeps meshes from ejecting the "
        "router")
    max_connections_per_address: Count | None = LIMITS.option(None,
        "connections of one client address; behind a proxy all clients have the same address")

    connect_timeout_s: Seconds = TIMEOUTS.option(5.0, "time to open a connection to an engine")
    first_token_timeout_s: Seconds = TIMEOUTS.option(300.0,
        "time that each engine has for its first token, with its time in the engine's queue: for a whole prefill leg, "
        "and to the first event of a stream", live=True)
    stream_idle_timeout_s: Seconds = TIMEOUTS.option(120.0,
        "longest pause between two pieces of a stream; when it moves, each engine has an eighth of this for its part",
        live=True)
    stream_comment_interval_s: SomeSeconds = TIMEOUTS.option(0.0,
        "time without an event after which a stream gets an SSE comment, for proxies that close quiet connections; 0: "
        "none", live=True)
    total_timeout_s: Seconds = TIMEOUTS.option(3600.0,
        "time for a response that is not streamed, with all retries", live=True)
    receive_timeout_s: Seconds = TIMEOUTS.option(30.0,
        "time for a client to send the head of a request, and again for its body (one second more for each 16 KiB)")
    drain_grace_s: SomeSeconds = TIMEOUTS.option(0.0,
        "time after SIGTERM in which new requests are still served, while /ready answers 503",
        live=True, chart="router.drain.graceSeconds")
    shutdown_timeout_s: WholeSeconds = TIMEOUTS.option(30,
        "time after that in which requests in flight may finish", live=True, chart="router.drain.shutdownSeconds")

    allow_unauthenticated: bool = SECURITY.option(False,
        "serve clients on other machines without API keys", chart="router.apiKeys.secretName")
    allowed_hosts: tuple[Host, ...] = SECURITY.option((),
        "further names by which clients may call the router (Host header); *: any", chart="router.allowedHosts")
    allowed_origins: tuple[Origin, ...] = SECURITY.option((),
        "origins of web pages that may call the endpoints from a browser (CORS); *: any; needs api_keys_file")
    tls_cert: File | None = SECURITY.option(None,
        "PEM file with the router's certificate and its chain; the router then serves https, at the admin port, too",
        chart="router.tls.secretName")
    tls_key: File | None = SECURITY.option(None, "PEM file with its private key", chart="router.tls.secretName")
    tls_client_ca: File | None = SECURITY.option(None,
        "PEM file with authorities; clients of the main port must present a certificate of one of them",
        chart="router.tls.clientCaSecretName")
    engine_ca: File | None = SECURITY.option(None,
        "PEM file with the authorities of https engines", unset="the system's", chart="engineTls.caSecretName")
    engine_cert: File | None = SECURITY.option(None,
        "PEM file with the certificate that the router presents to engines", chart="engineTls.clientSecretName")
    engine_key: File | None = SECURITY.option(None, "PEM file with its private key", chart="engineTls.clientSecretName")
    engine_server_name: DnsName | None = SECURITY.option(None,
        "DNS name that the certificate of every https engine must have, whatever its address (pods have only IPs)",
        unset="the host in each engine's address", chart="engineTls.serverName")
    prefill_api_key_file: File | None = SECURITY.option(None,
        "file with the API key that the router sends to prefill engines", live=True, chart="prefill.apiKey.secretName")
    decode_api_key_file: File | None = SECURITY.option(None,
        "file with the API key that the router sends to decode engines", live=True, chart="decode.apiKey.secretName")
    prefill_api_key: str | None = SECURITY.secret("PDRELAY_PREFILL_API_KEY",
        "API key for prefill engines, if prefill_api_key_file is not set",
        unset="no key is sent", chart="prefill.apiKey.secretName")
    decode_api_key: str | None = SECURITY.secret("PDRELAY_DECODE_API_KEY",
        "API key for decode engines, if decode_api_key_file is not set",
        unset="no key is sent", chart="decode.apiKey.secretName")
    admin_key_file: File | None = SECURITY.option(None,
        "file with the admin key, which /instances, /pairs and /requests require as X-Api-Key; it may have a "
        "second line with another one", live=True, chart="router.adminKey.secretName")
    admin_key: str | None = SECURITY.secret("ADMIN_API_KEY",
        "admin key, if admin_key_file is not set", unset="/instances answers 404", chart="router.adminKey.secretName")
    join_key_file: File | None = SECURITY.option(None,
        "file with the join key, by which an engine's host adds, drains, undrains and removes engines at its own "
        "address, and no others; it may have a second line with another one", live=True)
    allowed_media_domains: tuple[Host, ...] = SECURITY.option((),
        "hosts from which engines may fetch images, audio and videos that clients name by URL; *: any",
        unset="with API keys or client certificates none (data: URLs only), else any",
        chart="model.allowedMediaDomains")
    trust_request_chat_template: bool = SECURITY.option(False,
        "clients may send a chat template of their own; the engines need --trust-request-chat-template, too")
    cache_salt_per_key: Switch | None = SECURITY.option(None,
        "clients with different API keys share no entries of the engines' prefix caches, nor media that they name by "
        "an id", unset="true where api_keys_file names more than one client")
    cache_salt_secret: str | None = SECURITY.secret("PDRELAY_CACHE_SALT_SECRET",
        "secret for cache_salt_per_key, the same for all routers of a fleet",
        unset="each client's own key", chart="router.cacheSalt.secretName")
    public_metrics: bool = SECURITY.option(False, "show /, /stats and /metrics without an API key")

    admin_port: Port | None = ADMIN.option(None,
        "separate TCP port for metrics, status page and /instances, which then leave the main port; 0: the system "
        "chooses one", unset="they are on the main port", chart="router.adminPort")
    admin_host: str | None = ADMIN.option(None,
        "address to listen on for the admin port", unset="the same as host", chart="listenAddress")

    log_format: LogFormat = TELEMETRY.option(LogFormat.TEXT,
        "text: lines for people; json: one JSON object for each event")
    request_id_headers: tuple[HeaderName, ...] = TELEMETRY.option((),
        "request headers in which a client may name its request; the first that it sends counts",
        unset="X-Request-Id")
    server_timing: Switch | None = TELEMETRY.option(None,
        "tell clients which engines served a request, for how many milliseconds, and what they had cached "
        "(Server-Timing header)",
        unset="true, without what engines had cached where api_keys_file names more than one client")

    workers: Processes = WORKERS.option(1,
        "processes that serve one port, each a router with an admin port of its own: admin_port and those behind it; "
        "more than 1 on Linux only", chart="router.replicas")

    # fmt: on

    # No operator had a reason to choose these: tests change them, and they are no options.
    health_check_timeout_s: float = 5.0  # for one health check
    # before an ejected engine's trial; doubled after each that fails, up to 60 s
    ejection_time_s: float = 5.0
    # prefill legs request the engine's load, if the prefill policy uses it
    load_reports: bool = True
    # settings of features that differ from their defaults, one a class
    features: tuple[object, ...] = ()

    def for_feature(self, feature: type[T]) -> T:
        """Return the settings of a feature, by their class."""
        return (
            next((settings for settings in self.features if isinstance(settings, feature)), None)
            or feature()
        )

    def with_features(self, *feature_settings: object) -> "Settings":
        """Return these settings, with other settings of some features."""
        classes = {type(settings) for settings in feature_settings}
        kept = [settings for settings in self.features if type(settings) not in classes]
        return replace(
            self,
            features=(
                *kept,
                *[settings for settings in feature_settings if settings != type(settings)()],
            ),
        )
