"""What an operator can choose: ``kv_connector_extra_config`` and three environment variables, read once."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from xpyd_connector.errors import SettingsError

HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
SECRET_VARIABLE = "XPYD_CONNECTOR_SECRET"

DEFAULT_HOST, DEFAULT_PORT = "localhost", 5600  # vLLM's own defaults of those variables


class Mode(StrEnum):
    """Who moves the blocks; the same on all engines that meet."""

    PULL = "pull"  # the decode engine reads them
    PUSH = "push"  # the prefill engine writes them


class Granularity(StrEnum):
    """When a prefill engine pushes."""

    CHUNK = "chunk"  # what a step has computed, while the next one runs
    REQUEST = "request"  # everything, when the prompt is done


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine's choices. All times are seconds on the monotonic clock."""

    mode: Mode = Mode.PULL
    push_granularity: Granularity = Granularity.CHUNK
    registration_timeout: float = 480.0  # s that a decode engine waits for a push, its prefill's queue included
    kv_lease_duration: float = 30.0  # s that a prefill engine keeps finished blocks nobody has asked for
    transfer_timeout: float = 30.0  # s from a decode request's blocks being allocated to its KV being there
    handshake_timeout: float = 5.0  # s for connecting to a prefill engine, and again for its hello
    handshake_threads: int = 8  # prefill engines met at the same time
    retry_after: float = 1.0  # s before a prefill engine that could not be met is tried again; doubles up to 30
    progress_delay_us: int = 1000  # us between polls of NIXL's progress thread; 0 burns a core per engine
    idle_wait: float = 0.005  # s a step with nothing to compute waits for a transfer; 0 turns at full speed
    host_staging: bool | None = (
        None  # KV goes through host memory; None: if kv_buffer_device is "cpu" and the device is not
    )
    staging_blocks: int = 0  # blocks of each KV cache group and rank that fit into that memory; 0: two longest prompts
    max_leases: int = 65536  # requests whose blocks may be held at once; beyond it prefills are not handed over
    max_held_share: float = 0.9  # of the cache's blocks that leases may hold; beyond it prefills are not handed over
    revoke_after: float = 10.0  # s that a prefill lacks blocks before leases that nobody reads are revoked; 0: never
    engine_loop_timeout: float = 300.0  # s without a turn of the engine's loop before it renews nothing; 0: never
    host: str = DEFAULT_HOST  # where decode engines reach this engine; from VLLM_NIXL_SIDE_CHANNEL_HOST
    port: int = DEFAULT_PORT  # TCP port of data-parallel rank 0; from VLLM_NIXL_SIDE_CHANNEL_PORT
    secret: bytes = field(default=b"", repr=False)  # shared by all engines; from XPYD_CONNECTOR_SECRET

    @property
    def lease_extension(self) -> float:
        """Seconds a renewal adds, counted from its arrival: two thirds of the lease."""
        return self.kv_lease_duration * 2 / 3

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two renewals of the same lease: a sixth of it, so three may be lost.

        In push they also tell whether the prefill engine is alive, which must be known within ``transfer_timeout``.
        """
        sixth = self.kv_lease_duration / 6
        return min(sixth, self.transfer_timeout / 4) if self.mode is Mode.PUSH else sixth

    @property
    def patience(self) -> float:
        """Seconds a heartbeat may stay unanswered in push, so that a silence is noticed in ``transfer_timeout``."""
        return self.transfer_timeout - self.heartbeat_interval


FROM_ENVIRONMENT = ("host", "port", "secret")
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
    "engine_loop_timeout": 0,
    "staging_blocks": 0,
}
AT_MOST = 1e9  # of anything: beyond it, the system's clocks and sockets overflow
SHARES: Mapping[str, float] = {"max_held_share": 1.0}  # at most


def read_settings(extra_config: Mapping[str, object], environment: Mapping[str, str]) -> Settings:
    """Return the settings of this engine, or raise :exc:`SettingsError` naming the key and what would be right."""
    chosen = {
        key: READERS[key](key, value) if key in READERS else _number(key, value) for key, value in extra_config.items()
    }
    return Settings(
        **chosen,  # type: ignore[arg-type]  # _number has checked each against the field of that name
        host=environment.get(HOST_VARIABLE, DEFAULT_HOST),
        port=_port(environment.get(PORT_VARIABLE, str(DEFAULT_PORT))),
        secret=environment.get(SECRET_VARIABLE, "").encode(),
    )


CHOICES: Mapping[str, type[StrEnum]] = {"mode": Mode, "push_granularity": Granularity}


def _switch(key: str, value: object) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise SettingsError(f"kv_connector_extra_config[{key!r}] is {value!r}; it must be true, false or null")


def _choice(key: str, value: object) -> StrEnum:
    try:
        return CHOICES[key](str(value))
    except ValueError:
        known = " or ".join(repr(choice.value) for choice in CHOICES[key])
        raise SettingsError(f"kv_connector_extra_config[{key!r}] is {value!r}; it must be {known}") from None


READERS: Mapping[str, Callable[[str, object], object]] = {
    **dict.fromkeys(CHOICES, _choice),
    "host_staging": _switch,
}


def _number(key: str, value: object) -> float | int:
    types = {f.name: f.type for f in fields(Settings) if f.name not in FROM_ENVIRONMENT}
    if key not in types:
        near = difflib.get_close_matches(key, types, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(sorted(types))}"
        raise SettingsError(f"kv_connector_extra_config has no key {key!r}; {hint}")
    whole = types[key] in (int, "int")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise SettingsError(f"kv_connector_extra_config[{key!r}] is {value!r}; it must be {kind}")
    most = SHARES.get(key, AT_MOST)
    if not AT_LEAST[key] <= value <= most:
        raise SettingsError(
            f"kv_connector_extra_config[{key!r}] is {value!r}; it must be between {AT_LEAST[key]:g} and {most:g}"
        )
    return value if whole else float(value)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 5 or not 0 < int(text) < 65536:
        raise SettingsError(f"{PORT_VARIABLE} is {text!r}; it must be a TCP port between 1 and 65535")
    return int(text)
