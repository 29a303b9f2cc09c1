"""What runs on one machine and on which ports: arguments in, commands out."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.io.files import LOCAL_KEY_FILE
from pdrelay_tools.local.processes import Command
from pdrelay_tools.local.recipe import HOST, PYTHON_MODULE, Connector, EngineSpec, engine

TINY_FOLDER = Path(".pdrelay/models/tiny")  # random weights
SMOLLM2_FOLDER = Path(".pdrelay/models/SmolLM2-135M-Instruct")
_DEFAULT_ROOM = (2048, 128)  # tokens that a request may have, and MiB for the KV of all requests
_ROOM = {SMOLLM2_FOLDER: (4096, 256)}  # 23 kB of KV a token in bfloat16: 11,600 tokens


class EngineKind(StrEnum):
    """What plays the engines."""

    VLLM = "vllm"
    SIM = "sim"  # a pretended engine: no model, no KV, ready in a second


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """Engines and a router on this machine. Engine i of a role listens on its first port plus i."""

    prefill: int = 1  # engines
    decode: int = 1  # engines
    kind: EngineKind = EngineKind.VLLM
    connector: Connector = Connector.PDRELAY
    mode: EngineMode = EngineMode.PULL
    return_kv: bool = False  # prefill engines read KV of earlier answers from decode engines
    # the router uses the KV that engines have, and ours offer all that they can
    reuse_kv: bool = False
    port: int = 8000  # of the router
    prefill_port: int = 8100  # of the first prefill engine
    decode_port: int = 8200  # of the first decode engine
    side_channel_port: int = 5600  # of the first prefill engine; decode engines follow
    # of the router's routes for operators; None: they are at its own port
    admin_port: int | None = None
    has_own_key: bool = False  # the admin key of the router is in `key_file`
    has_own_secret: bool = False  # the secret of the engines is in `secret_file`
    engine_args: tuple[str, ...] = ()  # more options of vLLM
    kv_events: bool = False  # the router knows from the engines what they have cached
    dtype: str | None = None  # of the engines; None: vLLM's choice
    home: Path = LOCAL_KEY_FILE.parent  # logs, caches and the tiny model
    model: Path = TINY_FOLDER

    @property
    def served_name(self) -> str:
        """What clients call the model: the name of its folder."""
        return Path(os.path.abspath(self.model)).name or "model"  # noqa: PTH100 (a link keeps its own name)

    @property
    def router_url(self) -> str:
        """Where clients find the router."""
        return f"http://{HOST}:{self.port}"

    @property
    def admin_url(self) -> str:
        """Where operators find the router."""
        return f"http://{HOST}:{self.admin_port or self.port}"

    @property
    def key_file(self) -> Path:
        """Where the admin key is, if it was drawn here; commands that ask the router look there."""
        return self.home / LOCAL_KEY_FILE.name

    @property
    def secret_file(self) -> Path:
        """Where the connectors' secret is, if it was drawn here. An engine added later needs it."""
        return self.home / "connector-secret"

    @property
    def log_dir(self) -> Path:
        """Where every process has a log file."""
        return self.home / "logs"

    @property
    def kv_events_dir(self) -> Path:
        """Where engines that publish KV events have their sockets."""
        return self.home / "kv-events"

    @property
    def tells_events(self) -> bool:
        """Whether engines publish KV events: our connector brings the route for them."""
        return self.kv_events or (self.reuse_kv and self.has_ours)

    @property
    def has_ours(self) -> bool:
        """Whether engines have our connector."""
        return self.connector is Connector.PDRELAY and self.kind is EngineKind.VLLM

    @property
    def usual_mode(self) -> EngineMode:
        """Auto where engines offer it: the router measures the faster way for each pair."""
        return EngineMode.AUTO if self.reuse_kv and self.has_ours else EngineMode.PULL

    @property
    def _returned_kv(self) -> dict[str, object]:
        """The connector's setting; "auto": an engine that cannot return KV starts without it."""
        if self.return_kv:
            return {"return_kv": True}
        return {"return_kv": "auto"} if self.reuse_kv and self.has_ours else {}

    def engines(self) -> tuple[EngineSpec, ...]:
        """Return all engines, prefill first; their names are those that the router gives them."""
        kinds = (
            (Role.PREFILL, self.prefill, self.prefill_port),
            (Role.DECODE, self.decode, self.decode_port),
        )
        max_model_len, kv_cache_mib = _ROOM.get(self.model, _DEFAULT_ROOM)
        places = [
            (role, index, first + index) for role, count, first in kinds for index in range(count)
        ]
        return tuple(
            EngineSpec(
                name=f"{role.value}-{index}",
                port=port,
                model=self.model,
                served_name=self.served_name,
                max_model_len=max_model_len,
                kv_cache_mib=kv_cache_mib,
                role=role,
                connector=self.connector,
                mode=self.mode,
                side_channel_port=self.side_channel_port + number,
                extra_connector_config=self._returned_kv,
                cache_dir=self.home / "cache",
                kv_events=self.kv_events_dir if self.tells_events else None,
                timelines=self.connector is Connector.PDRELAY,
                dtype=self.dtype,
                extra_args=self.engine_args,
            )
            for number, (role, index, port) in enumerate(places)
        )

    def addresses(self, role: Role) -> list[str]:
        """Return the addresses of the engines of one role, as the router takes them."""
        return [spec.address for spec in self.engines() if spec.role is role]

    def ports(self) -> Iterator[tuple[int, str, str]]:
        """Yield every port that must be free, who needs it, and the option that moves it."""
        yield self.port, "the router", "--port"
        if self.admin_port is not None:
            yield self.admin_port, "the router's routes for operators", "--admin-port"
        for spec in self.engines():
            yield (
                spec.port,
                spec.name,
                "--prefill-port" if spec.role is Role.PREFILL else "--decode-port",
            )
            if self.kind is EngineKind.VLLM and spec.side_channel_port is not None:
                yield (
                    spec.side_channel_port,
                    f"the side channel of {spec.name}",
                    "--side-channel-port",
                )


def engine_command(plan: LocalPlan, spec: EngineSpec, inherited: Mapping[str, str]) -> Command:
    """Return how to start one engine of the plan."""
    if plan.kind is EngineKind.VLLM:
        return engine(spec, inherited)
    options = ["--role", str(spec.role), "--port", str(spec.port), "--model", spec.served_name]
    options += ["--mode", str(spec.mode)]
    argv = [*PYTHON_MODULE, "pdrelay_tools.simulated.engine", *options]
    return Command(spec.name, argv, inherited, f"{spec.base_url}/health")


def router_command(plan: LocalPlan, inherited: Mapping[str, str]) -> Command:
    """Return how to start the router in front of all engines of the plan."""
    argv = [*PYTHON_MODULE, "pdrelay_proxy.cli", "serve", "--host", HOST, "--port", str(plan.port)]
    argv += ["--prefill", *plan.addresses(Role.PREFILL), "--decode", *plan.addresses(Role.DECODE)]
    if plan.admin_port is not None:
        argv += ["--admin-port", str(plan.admin_port)]
    if plan.has_own_key:
        argv += ["--admin-key-file", str(plan.key_file)]
    if plan.reuse_kv:
        argv += ["--reuse-kv", "true"]
    elif plan.kv_events or plan.return_kv:  # for which it must know where conversations are
        argv += ["--kv-events", "auto"] if plan.kv_events else []
        argv += ["--return-kv", "true"] if plan.return_kv else []
        argv += ["--prefill-policy", "prefix", "--decode-policy", "prefix"]
    return Command("router", argv, inherited, f"{plan.router_url}/health")
