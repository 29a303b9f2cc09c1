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


@dataclass(frozen=True, slots=True)
class Settings:
    """The choices, with their defaults and units."""

    prefill: tuple[str, ...] = ()  # addresses of the prefill engines: host:port or http(s)://host:port
    decode: tuple[str, ...] = ()  # addresses of the decode engines
    host: str = "127.0.0.1"  # interface to listen on
    port: int = 8000  # TCP port to listen on; 0 lets the system choose
    model: str | None = None  # model every engine must serve; None: the first one an engine names
    admin_key: str | None = field(default=None, repr=False)  # X-Api-Key of /instances/add; None: nobody may add
    client_kv_params: ClientKvParams = ClientKvParams.REFUSE  # kv_transfer_params in a client's body
    mode: Mode = Mode.AUTO  # push: both legs are sent at once
    retries: int = 2  # legs of one request that may fail before the client is told
    max_body_bytes: int = 16 * 1024 * 1024  # bytes of a request body; more is answered with 413
    connect_timeout_s: float = 5.0  # seconds to open a connection to an engine
    prefill_timeout_s: float = 300.0  # seconds for a whole prefill leg, queueing included
    probe_timeout_s: float = 5.0  # seconds for a GET /v1/models of an engine
    engine_keepalive_s: float = 4.0  # seconds an idle engine connection is kept; vLLM closes it after 5
    client_keepalive_s: int = 75  # seconds an idle client connection is kept
    shutdown_timeout_s: int = 30  # seconds that requests in flight get to finish after SIGTERM
