"""The operator's settings: ``kv_connector_extra_config``, and four environment variables."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import NoneType
from typing import Final, Literal, NamedTuple, cast

from pdrelay_connector.errors import SettingsError

HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
SECRET_VARIABLE = "PDRELAY_CONNECTOR_SECRET"
SECRET_FILE_VARIABLE = "PDRELAY_CONNECTOR_SECRET_FILE"

# vLLM's own defaults of those variables
DEFAULT_HOST = "localhost"
DEFAULT_PORT = 5600
SHORTEST_SECRET = 16  # bytes: who sees one Hello may try secrets for as long as it likes
MOST_SECRETS = 2  # the new one and, while engines are given it, the old one


class Mode(StrEnum):
    """Who moves the blocks; the same on all engines that meet."""

    PULL = "pull"  # the decode engine reads them
    PUSH = "push"  # the prefill engine writes them
    # either, as the router says in each request's kv_transfer_params; pull if it says nothing
    AUTO = "auto"

    @property
    def pulls(self) -> bool:
        """Whether decode engines read what prefill engines keep."""
        return self is not Mode.PUSH

    @property
    def pushes(self) -> bool:
        """Whether prefill engines may write into decode engines' caches."""
        return self is not Mode.PULL


class Backend(NamedTuple):
    """A backend of NIXL with its plugin's parameters, such as ``num_workers`` of UCX."""

    name: str
    parameters: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine's choices. All times are seconds on the monotonic clock."""

    mode: Mode = Mode.PULL
    # s that a decode engine waits for a push, its prefill's queue included
    registration_timeout: float = 480.0
    # s that a prefill engine keeps finished blocks until the first renewal
    kv_lease_duration: float = 30.0
    # s from a decode request's blocks being allocated to its KV being there
    transfer_timeout: float = 30.0
    handshake_timeout: float = 5.0  # s for connecting to a prefill engine, and again for its hello
    handshake_threads: int = 8  # prefill engines met at the same time
    # s before a prefill engine that could not be met is tried again; doubles up to 30
    retry_after: float = 1.0
    # us between polls of NIXL's progress thread, of ours with a device; 0 burns a core per engine
    progress_delay_us: int = 1000
    # s a step with nothing to compute waits for a transfer; 0 turns at full speed
    idle_wait: float = 0.005
    # KV goes through host memory; None: if kv_buffer_device is "cpu" and the device is not
    host_staging: bool | None = None
    # blocks of each KV cache group and rank that fit into that memory; 0: two longest prompts
    staging_blocks: int = 0
    # requests whose blocks may be held at once; beyond it prefills are not handed over
    max_leases: int = 65536
    # of the cache's blocks that leases may hold; beyond it prefills are not handed over
    max_held_share: float = 0.9
    # s that a prefill lacks blocks before unread leases are revoked; 0: never
    revoke_after: float = 10.0
    # of prefills, of which sampled blocks are compared after their transfer; 0: of none
    verify_share: float = 0.0
    verify_blocks: int = 8  # blocks that are compared of each of them, at most
    # Lend what the prefix cache has to prefill engines, and ask decode engines for the same;
    # "auto": if it can.
    return_kv: bool | Literal["auto"] = False
    # s that a prefill waits for a decode engine to say what it has of the prompt
    return_timeout: float = 1.0
    # s without a turn of the engine's loop before it renews nothing; 0: never
    engine_loop_timeout: float = 300.0
    # of NIXL, in the order in which it should prefer them
    backends: tuple[Backend, ...] = (Backend("UCX"),)
    # of remote_host; False: routers may replace it, and the handshake alone proves who answers
    sign_host: bool = True
    nixl_metrics: bool = False  # show the metrics of vLLM's NixlConnector beside ours
    # NIXL may listen on other interfaces than that of the side channel
    allow_open_data_plane: bool = False
    # the side channel may be at an address that others reach, without a secret
    allow_open_side_channel: bool = False
    tls_cert: str = ""  # PEM file: the side channel's certificate; "": one is made at start
    tls_key: str = ""  # PEM file: its private key; "": it is in tls_cert
    tls_ca: str = ""  # PEM file: both sides must show a certificate of these authorities
    # name in the certificates of engines, with tls_ca; "": the host that is dialled
    tls_server_name: str = ""
    # where decode engines reach this engine; from VLLM_NIXL_SIDE_CHANNEL_HOST
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT  # TCP port of data-parallel rank 0; from VLLM_NIXL_SIDE_CHANNEL_PORT
    # shared by all engines; from PDRELAY_CONNECTOR_SECRET
    secrets: tuple[bytes, ...] = field(default=(), repr=False)
    # file with one or two of them, read again when it changes; from PDRELAY_CONNECTOR_SECRET_FILE
    secret_file: str = ""

    @property
    def lease_extension(self) -> float:
        """Seconds a renewal adds, counted from its arrival: two thirds of the lease."""
        return self.kv_lease_duration * 2 / 3

    @property
    def sums_timeout(self) -> float:
        """Seconds a fence result waits for checksums: well below ``transfer_timeout``."""
        return min(self.transfer_timeout / 4, 5.0)

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two renewals of a lease, if the prefill engine's lease is no shorter.

        At most a sixth of the lease, so that three renewals may be lost. In push they also check
        within ``transfer_timeout`` that the prefill engine is alive; in pull they repeat which
        leases are being read, which that engine believes for as long.
        """
        # 300 s: a prefill engine closes a connection that was silent for an hour.
        return min(self.kv_lease_duration / 6, self.transfer_timeout / 4, 300.0)

    @property
    def peer_timeout(self) -> float:
        """Seconds to wait for a heartbeat's answer in push, to notice silence in time."""
        return self.transfer_timeout - self.heartbeat_interval


FROM_ENVIRONMENT = ("host", "port", "secrets", "secret_file")
AT_LEAST: Mapping[str, float] = {
    "kv_lease_duration": 0.5,
    "transfer_timeout": 0.1,
    "registration_timeout": 0.1,
    "handshake_timeout": 0.1,
    "handshake_threads": 1,
    "retry_after": 0.01,
    "progress_delay_us": 0,
    "idle_wait": 0,
    "max_leases": 1,
    "max_held_share": 0.01,
    "revoke_after": 0,
    "return_timeout": 0.01,
    "engine_loop_timeout": 0,
    "staging_blocks": 0,
    "verify_share": 0,
    "verify_blocks": 1,
}
AT_MOST = 1e9  # of anything: beyond it, the system's clocks and sockets overflow
MOST_SAMPLED = 256  # blocks of one request: core/messages.py carries no more
# at most
BOUNDS: Mapping[str, float] = {
    "max_held_share": 1.0,
    "verify_share": 1.0,
    "verify_blocks": MOST_SAMPLED,
}


# What the names of vLLM's own connectors mean, when they load ours (pdrelay_connector/nixl.py).
MODE_OF_NAME: Mapping[str, Mode] = {
    "NixlConnector": Mode.PULL,
    "NixlPullConnector": Mode.PULL,
    "NixlPushConnector": Mode.PUSH,
}
# Keys of vLLM 0.32's own NixlConnector (kv_connector/v1/nixl/) that mean the same here -> ours.
SAME: Mapping[str, str] = {"push_registration_timeout": "registration_timeout"}
# Others of its keys that it does no harm not to know -> what is done here instead. Said once, at
# start.
INSTEAD: Mapping[str, str] = {
    "num_threads": "NIXL has one progress thread here, and progress_delay_us is between its polls",
    "engine_ttl": "what is known of another engine is forgotten when its connection closes",
    "kv_recompute_threshold": (
        "all of a prompt that is not in the engine's own prefix cache is loaded"
    ),
    "bidirectional_kv_xfer": (
        "return_kv is the setting by which KV of answers goes back to prefill engines"
    ),
    "decoder_kv_blocks_ttl": "blocks of answers stay as long as the prefix cache keeps them, and registration_timeout "
    "is how long a decode engine waits for a push",
}
INSTEAD_OF_VARIABLES: Mapping[str, str] = {
    "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "kv_lease_duration in kv_connector_extra_config says how long blocks are kept "
    "that no decode engine asks for",
}
# What its operators may switch off and ours may not -> why.
ALWAYS: Mapping[str, str] = {
    "enforce_handshake_compat": "KV of an engine that differs is a wrong text with status 200"
}


def remarks(extra_config: Mapping[str, object], environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each given setting of vLLM's connector that has no effect here."""
    keys = [
        f"kv_connector_extra_config[{key!r}] is ignored: {INSTEAD[key]}"
        for key in INSTEAD
        if key in extra_config
    ]
    return keys + [
        f"{name} is ignored: {instead}"
        for name, instead in INSTEAD_OF_VARIABLES.items()
        if name in environment
    ]


def read_settings(
    extra_config: Mapping[str, object], environment: Mapping[str, str], connector: str = ""
) -> Settings:
    """Return the settings of this engine; raises :exc:`SettingsError` with the key and a remedy.

    ``connector``: the name under which vLLM has loaded this connector; some names mean a mode.
    """
    chosen = {
        key: READERS[key](key, value) if key in READERS else _number(key, value)
        for key, value in _in_our_names(extra_config).items()
    }
    if connector in MODE_OF_NAME:
        chosen["mode"] = _mode_of_name(connector, chosen.get("mode"))
    settings = Settings(
        **chosen,  # type: ignore[arg-type]  # _number has checked each against the field of that name
        host=environment.get(HOST_VARIABLE, DEFAULT_HOST),
        port=_port(environment.get(PORT_VARIABLE, str(DEFAULT_PORT))),
        secrets=parse_secrets(environment.get(SECRET_VARIABLE, ""), SECRET_VARIABLE),
        secret_file=environment.get(SECRET_FILE_VARIABLE, ""),
    )
    if settings.secrets and settings.secret_file:
        raise SettingsError(
            f"{SECRET_VARIABLE} and {SECRET_FILE_VARIABLE} are both set; leave one of them out"
        )
    if (settings.tls_key or settings.tls_ca) and not settings.tls_cert:
        raise SettingsError(
            "tls_key or tls_ca is set and tls_cert is not; name this engine's certificate, too"
        )
    if settings.tls_server_name and not settings.tls_ca:
        raise SettingsError(
            "tls_server_name is set and tls_ca is not; without authorities no name is checked"
        )
    return settings


def _mode_of_name(connector: str, chosen: object) -> Mode:
    named = MODE_OF_NAME[connector]
    if chosen is None or chosen is named:
        return named
    if chosen is Mode.AUTO:
        return Mode.AUTO
    raise SettingsError(
        f"kv_connector is {connector!r} and kv_connector_extra_config['mode'] is {str(chosen)!r}; "
        f"the name means {named.value!r}, so leave mode out or use another name"
    )


def parse_secrets(text: str, where: str) -> tuple[bytes, ...]:
    """Return the secrets of a text's lines; raises SettingsError.

    The error names their source (``where``), and never the secrets.
    """
    # encode() would raise an error that has the text
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise SettingsError(
            f"{where} is not UTF-8; it must be text, such as what 'openssl rand -hex 32' prints"
        )
    secrets = tuple(line.strip().encode() for line in text.splitlines() if line.strip())
    if len(secrets) > MOST_SECRETS:
        raise SettingsError(
            f"{where} has {len(secrets)} lines; it must have one secret, or the new one and the "
            f"old one"
        )
    for secret in secrets:
        if len(secret) < SHORTEST_SECRET:
            raise SettingsError(
                f"{where} has a secret of {len(secret)} bytes; it must have at least "
                f"{SHORTEST_SECRET}, such as what 'openssl rand -hex 32' prints"
            )
    return secrets


def _in_our_names(extra_config: Mapping[str, object]) -> dict[str, object]:
    """Return the settings without those that only vLLM's own connector has."""
    for key, reason in ALWAYS.items():
        if extra_config.get(key, True) is not True:
            raise SettingsError(
                f"kv_connector_extra_config[{key!r}] is {extra_config[key]!r}; it must be true: "
                f"{reason}"
            )
    for theirs, ours in SAME.items():
        if theirs in extra_config and ours in extra_config:
            raise SettingsError(
                f"kv_connector_extra_config has {theirs!r} and {ours!r}; they are one setting, "
                f"give one"
            )
    return {
        SAME.get(key, key): value
        for key, value in extra_config.items()
        if key not in {*INSTEAD, *ALWAYS}
    }


CHOICES: Mapping[str, type[StrEnum]] = {"mode": Mode}


def _choice(key: str, value: object) -> StrEnum:
    try:
        return CHOICES[key](str(value))
    except ValueError:
        choices = " or ".join(repr(choice.value) for choice in CHOICES[key])
        raise SettingsError(
            f"kv_connector_extra_config[{key!r}] is {value!r}; it must be {choices}"
        ) from None


AUTO: Final = "auto"  # of a switch: on where this engine can do it
AUTOMATIC: Final = frozenset({"return_kv"})
_SWITCH = ((bool,), "true or false")
_TEXT = ((str,), "a text")
KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "host_staging": ((bool, NoneType), "true, false or null"),
    **dict.fromkeys(
        ("sign_host", "nixl_metrics", "allow_open_data_plane", "allow_open_side_channel"), _SWITCH
    ),
    "return_kv": ((bool,), 'true, false or "auto"'),
    **dict.fromkeys(("tls_cert", "tls_key", "tls_ca", "tls_server_name"), _TEXT),
}


def _of_kind(key: str, value: object) -> object:
    types, words = KINDS[key]
    if isinstance(value, types) or (key in AUTOMATIC and value == AUTO):
        return value
    raise SettingsError(f"kv_connector_extra_config[{key!r}] is {value!r}; it must be {words}")


def _backends(key: str, value: object) -> tuple[Backend, ...]:
    """Parse a list of names, as vLLM's NixlConnector has it, or a mapping to their parameters."""
    entries: Mapping[object, object] = {}
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value)
    elif isinstance(value, (list, tuple)):
        names = cast("Sequence[object]", value)
        if all(isinstance(name, str) for name in names):
            entries = {name: {} for name in names}
    backends = tuple(
        Backend(str(name), _parameters(key, name, parameters))
        for name, parameters in entries.items()
    )
    if backends and all(isinstance(name, str) and name for name in entries):
        return backends
    raise SettingsError(
        f"kv_connector_extra_config[{key!r}] is {value!r}; it must be a list of NIXL's backends "
        f"such as ['UCX'], or a "
        "mapping of each to its parameters such as {'UCX': {'num_workers': '4'}}"
    )


def _parameters(key: str, name: object, value: object) -> Mapping[str, str]:
    if isinstance(value, Mapping):
        parameters = cast("Mapping[object, object]", value)
        if all(isinstance(entry, str) for entry in parameters) and all(
            isinstance(entry, (str, int, float)) for entry in parameters.values()
        ):
            return {str(entry): str(value) for entry, value in parameters.items()}
    raise SettingsError(
        f"kv_connector_extra_config[{key!r}] has {value!r} for {name!r}; it must map names to "
        f"texts or numbers"
    )


READERS: Mapping[str, Callable[[str, object], object]] = {
    **dict.fromkeys(CHOICES, _choice),
    **dict.fromkeys(KINDS, _of_kind),
    "backends": _backends,
}


def _number(key: str, value: object) -> float | int:
    types = {f.name: f.type for f in fields(Settings) if f.name not in FROM_ENVIRONMENT}
    if key not in types:
        near = difflib.get_close_matches(key, types, n=1)
        hint = (
            f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(sorted(types))}"
        )
        raise SettingsError(f"kv_connector_extra_config has no key {key!r}; {hint}")
    whole = types[key] in (int, "int")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise SettingsError(f"kv_connector_extra_config[{key!r}] is {value!r}; it must be {kind}")
    most = BOUNDS.get(key, AT_MOST)
    if not AT_LEAST[key] <= value <= most:
        raise SettingsError(
            f"kv_connector_extra_config[{key!r}] is {value!r}; it must be between "
            f"{AT_LEAST[key]:g} and {most:g}"
        )
    return value if whole else float(value)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 5 or not 0 < int(text) < 65536:
        raise SettingsError(
            f"{PORT_VARIABLE} is {text!r}; it must be a TCP port between 1 and 65535"
        )
    return int(text)
