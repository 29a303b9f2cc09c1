"""The routers that are compared, and how each is started."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from support.compiled import NoCompiler, compiled

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".pdrelay/bench-peers"  # a virtual environment
RUST_ROUTER = "vllm-router==0.1.17"  # as in the file
PACKAGES = ("fastapi", "httpx", "uvicorn", "uvloop", "httptools", "msgspec")  # of the others
PEERS_LOCKED = Path(__file__).with_name("requirements-peer.txt")


class Missing(Exception):
    """A router that cannot be had here; the message says why."""


class Contestant(NamedTuple):
    """One router."""

    name: str
    about: str
    command: object  # (ports of prefill engines, of decode engines, free ports) -> argv


def _urls(ports):
    return [f"http://127.0.0.1:{port}" for port in ports]


def _both(prefill, decode):
    return ["--prefill", *_urls(prefill), "--decode", *_urls(decode)]


def _serve(prefill, decode, ports):
    return ["serve", *_both(prefill, decode), "--port", ports[0]]


def _plain(*ports):
    return [Path(sys.executable).with_name("pdrelay"), *_serve(*ports)]


def _compiled(*ports):
    return ["env", _found_compiled(), *_plain(*ports)]


def _found_compiled(*places):
    return f"PYTHONPATH={os.pathsep.join([str(compiled()), str(ROOT), *places])}"


_PLACES = 8  # of 32 connections: three requests of four wait for one


def _queued(*ports):
    return [*_compiled(*ports), "--max-concurrency", str(_PLACES), "--max-queue", "1000"]


# whose compiled modules are those of this Python
SYSTEM = Path(f"/usr/bin/python3.{sys.version_info.minor}")


def _system(*ports):
    places = _found_compiled(sysconfig.get_path("purelib"))
    return ["env", places, SYSTEM, "-m", "pdrelay_proxy.cli", *_serve(*ports)]


def _rust(prefill, decode, ports):
    argv = [PEERS / "bin/vllm-router", "--vllm-pd-disaggregation", "--policy", "round_robin"]
    for flag, urls in (("--prefill", _urls(prefill)), ("--decode", _urls(decode))):
        for url in urls:
            argv += [flag, url]
    return [*argv, "--host", "127.0.0.1", "--port", ports[0], "--prometheus-port", ports[1]]


def _toy(prefill, decode, ports):
    toy = Path(__file__).with_name("toy_proxy.py")
    return [sys.executable, toy, *_both(prefill, decode), "--port", ports[0]]


_ALL = (
    Contestant(
        "pdrelay",
        "`pdrelay serve` with its defaults: everything on, a log line for every request; compiled",
        _compiled,
    ),
    Contestant("system", f"pdrelay under {SYSTEM}, as the distribution has built it", _system),
    Contestant("plain", "pdrelay as Python, as it is in a checkout", _plain),
    Contestant(
        "queued", f"pdrelay with `--max-concurrency {_PLACES}`: most requests wait", _queued
    ),
    Contestant(
        "vllm-router",
        f"`{RUST_ROUTER}` (Rust), `--vllm-pd-disaggregation --policy round_robin`",
        _rust,
    ),
    Contestant("toy", "FastAPI and httpx in 90 lines, without a log (`toy_proxy.py`)", _toy),
)
CONTESTANTS = {each.name: each for each in _ALL}


def prepare(name):
    """Install what a contestant needs.

    Raises:
        Missing: that is not possible here.
    """
    if name == "system" and (not SYSTEM.exists() or SYSTEM.samefile(sys.executable)):
        raise Missing(f"system: there is no {SYSTEM} beside the Python of this environment")
    if name in ("pdrelay", "system", "queued"):
        try:
            compiled()
        except NoCompiler as exc:
            raise Missing(f"pdrelay cannot be compiled here: {exc}") from exc
    if name != "vllm-router" or _is_installed():
        return
    steps = (
        [sys.executable, "-m", "venv", PEERS],
        [PEERS / "bin/pip", "-q", "install", "--no-deps", "--require-hashes", "-r", PEERS_LOCKED],
    )
    for step in steps:
        done = subprocess.run([*map(str, step)], capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
            raise Missing(
                f"{RUST_ROUTER} cannot be installed into {PEERS.relative_to(ROOT)}: {last}"
            )


def _is_installed():
    name, _, number = RUST_ROUTER.partition("==")
    return (PEERS / "bin/vllm-router").exists() and any(
        PEERS.glob(f"lib/python*/site-packages/{name.replace('-', '_')}-{number}.dist-info")
    )


def environment():
    """Return the environment of routers and helpers.

    They start from bytecode, as what is installed does.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    compiled = str(ROOT / ".pdrelay/bench/bytecode")
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPYCACHEPREFIX": compiled,
    }
