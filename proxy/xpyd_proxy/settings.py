"""Everything a user of the router can choose, read once at start-up."""

from dataclasses import dataclass, field
from enum import StrEnum


class ClientKvParams(StrEnum):
    """What happens to KV transfer parameters that a client sends."""

    REFUSE = "refuse"  # answer 400
    STRIP = "strip"  # drop them and serve the request


class Mode(StrEnum):
    """Who moves the KV cache: the prefill engine writes it (push), or the decode engine reads it (pull)."""

    AUTO = "auto"  # as each prefill engine says in its answers
    PULL = "pull"  # always one leg after the other
    PUSH = "push"  # every prefill engine pushes; one that says it does not is an error


class LogLevel(StrEnum):
    """The least severe records that the log shows."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How the log looks."""

    TEXT = "text"  # lines for people
    JSON = "json"  # one object for each event


class PolicyName(StrEnum):
    """How the engine of one leg is chosen."""

    ROUND_ROBIN = "round_robin"  # in turn; if both legs are, every prefill engine meets every decode engine
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"  # the less loaded of two that chance picks
    SESSION = "session"  # the same engine for one X-Session-ID; without it, the least loaded
    PREFIX = "prefix"  # the engine that has seen the longest beginning of the prompt, unless it is overloaded


@dataclass(frozen=True, slots=True)
class Settings:
    """The choices, with their defaults and units."""

    prefill: tuple[str, ...] = ()  # addresses of the prefill engines: host:port or http(s)://host:port
    decode: tuple[str, ...] = ()  # addresses of the decode engines
    host: str = "127.0.0.1"  # interface to listen on
    allow_unauthenticated: bool = False  # listen beyond this machine, and let everybody ask who reaches it
    allowed_hosts: tuple[str, ...] = ()  # names in Host that are this router's, too; *: all are
    port: int = 8000  # TCP port to listen on; 0 lets the system choose
    workers: int = 1  # processes that serve, with one view of engines and limits; 1: this one, and no other
    model: str | None = None  # model that an engine added at run time must serve; None: any
    instances_allow: tuple[str, ...] = ()  # where added engines may be; (): loopback and private networks
    admin_key: str | None = field(default=None, repr=False)  # X-Api-Key of /instances; None: nobody may add
    client_kv_params: ClientKvParams = ClientKvParams.REFUSE  # kv_transfer_params in a client's body
    mode: Mode = Mode.AUTO  # push: both legs are sent at once
    retries: int = 2  # legs of one request that may fail before the client is told
    max_body_bytes: int = 16 * 1024 * 1024  # bytes of a request body; more is answered with 413
    connect_timeout_s: float = 5.0  # seconds to open a connection to an engine
    prefill_timeout_s: float = 300.0  # seconds for a whole prefill leg, queueing included
    first_token_timeout_s: float = 300.0  # seconds from a streamed decode leg to its first event
    idle_timeout_s: float = 120.0  # seconds a stream may be silent between two pieces
    total_timeout_s: float = 3600.0  # seconds for an answer that is not streamed, with all retries
    stream_timeout_s: float | None = None  # seconds for a streamed one; None: as long as it takes
    handoff_timeout_s: float = 20.0  # seconds from a prefill answer in which a decode leg may go out
    min_prompt_chars: int = 0  # a prompt whose JSON has fewer bytes is served by one engine; 0: none is too short
    alone_without_prefill: bool = True  # decode engines serve alone as long as there is no prefill engine
    reuse_tokens: bool = False  # a chat is rendered and tokenized by the prefill engine only
    resume: bool = False  # another decode engine goes on with a stream that breaks off
    probe_timeout_s: float = 5.0  # seconds for a GET /v1/models of an engine
    engine_keepalive_s: float = 4.0  # seconds an idle engine connection is kept; vLLM closes it after 5
    client_keepalive_s: int = 75  # seconds an idle client connection is kept
    client_timeout_s: float = 300.0  # seconds in which a client must read some of its answer
    head_timeout_s: float = 10.0  # seconds from the beginning of a connection, or of a request, to the end of its head
    body_timeout_s: float = 30.0  # seconds for a body, and one more for each 16 KiB of it that has come
    max_connections: int = 16384  # connections of clients; more are answered with 503 and closed
    max_connections_per_address: int | None = None  # the same of one address; None: behind a proxy all have the same
    shutdown_timeout_s: int = 30  # seconds that requests in flight get to finish after SIGTERM
    drain_grace_s: float = 0.0  # seconds after SIGTERM in which new requests are still served: /ready is 503 at once
    log_level: LogLevel = LogLevel.INFO  # what the log shows
    log_format: LogFormat = LogFormat.TEXT  # how it looks
    otlp_endpoint: str | None = None  # base URL of the collector that gets the spans (OTLP over HTTP); None: no spans
    api_keys_file: str | None = None  # keys that clients must show, one name:key a line; None: anybody may ask
    prefill_api_key_file: str | None = None  # file with the key that prefill engines want, instead of the environment
    decode_api_key_file: str | None = None  # the same for decode engines
    cache_salt_per_key: bool = False  # keep what one key sends out of the prefix cache of all others
    cache_salt_secret: str | None = field(default=None, repr=False)  # of the fleet, for that; None: each key is its own
    server_timing: bool = True  # tell clients the engines of a request and their milliseconds
    open_metrics: bool = False  # /, /stats and /metrics want no key where clients need one
    forward_client_key: bool = False  # engines without a key of their pool get the Authorization of the client
    max_concurrency: int = 4096  # requests that are served at the same time; more wait
    max_queue: int = 1024  # requests that wait; more are refused
    max_queue_wait_s: float = 30.0  # seconds that a request waits at most
    max_held_bytes: int = 1024 * 1024 * 1024  # bytes of the bodies of all requests that are served or wait
    max_rate: float | None = None  # requests a second of all clients; None: no limit
    max_key_concurrency: int | None = None  # requests of one key that are served or wait
    max_key_rate: float | None = None  # requests a second of one key
    min_priority: int = 0  # least (so most urgent) priority of a client whose key has none of its own
    tls_cert: str | None = None  # PEM file, the router's certificate and those that vouch for it; None: plain HTTP
    tls_key: str | None = None  # PEM file, its private key
    tls_client_ca: str | None = None  # PEM file; clients must show a certificate of these authorities
    engine_ca: str | None = None  # PEM file, authorities of https engines; None: those of the system
    engine_cert: str | None = None  # PEM file, the certificate that the router shows to engines
    engine_key: str | None = None  # PEM file, its private key
    prefill_api_key: str | None = field(default=None, repr=False)  # what prefill engines want; None: nothing is shown
    decode_api_key: str | None = field(default=None, repr=False)  # the same for decode engines
    prefill_policy: PolicyName = PolicyName.ROUND_ROBIN  # how the engine of the prefill leg is chosen
    decode_policy: PolicyName = PolicyName.ROUND_ROBIN  # the same for decode
    load_reports: bool = True  # prefill engines are asked how busy they are, if their policy cares
    retry_share: float = 0.2  # retries of all requests together, as a share of the requests
    retry_floor: float = 1.0  # retries a second that are granted however few requests there are
    probe_interval_s: float = 5.0  # seconds between two probes of an engine; 0: requests alone tell how it is
    hung_timeout_s: float = 30.0  # seconds without an answer to a probe before requests in flight there are given up
    break_after: int = 5  # requests in a row that fail until an engine counts as broken
    break_probes: int = 2  # probes in a row that fail, for the same
    break_share: float = 0.5  # share of an engine's requests that fail within break_window_s, for the same
    break_window_s: float = 30.0  # seconds
    break_window_least: int = 20  # requests within break_window_s below which break_share says nothing
    rest_s: float = 5.0  # seconds before a broken engine gets one request again; doubled with every one that fails
    rest_most_s: float = 60.0  # seconds that this may become at most
    kubernetes_selector: str | None = None  # label selector of the pods that are engines; None: no pods are looked for
    kubernetes_namespace: str | None = None  # where they are; None: where the router is
    store: str = "memory"  # where /instances/add keeps engines: memory, file:PATH, kubernetes:CONFIGMAP, redis://...
    drain_patience_s: float = 60.0  # seconds without a request after which a draining prefill engine's leases are over
