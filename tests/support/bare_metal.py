"""Fleets outside of Kubernetes, as the examples start them, with simulated engines and the secrets in files."""

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from support.cluster import ROOT, free_ports

EXAMPLES = ROOT / "examples"
CLIENT = "client-key-0123456789"
ENGINE = "engine-key-0123456789"
ADMIN = "admin-key-0123456789"
CONNECTOR = "c" * 40
JOIN = "join-key-0123456789"
SECRETS = {
    "client-keys": f"somebody:{CLIENT}\n",
    "engine-key": f"{ENGINE}\n",
    "admin-key": f"{ADMIN}\n",
    "join-key": f"{JOIN}\n",
    "connector-secret": f"{CONNECTOR}\n",
}


@dataclass(frozen=True)
class Site:
    """A machine of a fleet: programs, secrets, and ports of its own."""

    folder: Path
    ports: tuple[int, int, int]  # of the router, the prefill and the decode engine
    admin_port: int | None = None  # of the router; None: the same port

    @property
    def secrets(self):
        return self.folder / "secrets"

    @property
    def programs(self):
        return self.folder / "bin"

    @property
    def router(self):
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def operators(self):
        """The URL that operators and engine.sh ask."""
        return f"http://127.0.0.1:{self.admin_port or self.ports[0]}"

    @property
    def environment(self):
        """What a service manager gives a process, and where the sources are; nothing of the tests' own."""
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "TMPDIR") if name in os.environ}
        return {
            **kept,
            "PATH": f"{self.programs}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder),
            "PRETENDED_LOG": str(self.folder),
        }

    def given(self, port):
        """Return what the engine at a port was started with."""
        return json.loads((self.folder / f"{port}.json").read_text())

    def instances(self):
        """Return what the router says of its engines: address -> state."""
        answer = httpx.get(f"{self.operators}/instances", headers={"X-Api-Key": ADMIN}, trust_env=False, timeout=20)
        return {row["address"]: row["state"] for row in answer.raise_for_status().json()["instances"]}

    def ask(self, **body):
        body = {"model": "m", "prompt": "once upon a time", "max_tokens": 5, **body}
        headers = {"Authorization": f"Bearer {CLIENT}"}
        return httpx.post(f"{self.router}/v1/completions", json=body, headers=headers, trust_env=False, timeout=60)

    @contextmanager
    def streaming(self, tokens):
        """Stream an answer in a thread; the block begins after its first token. Yields what came, as a list."""
        came = []
        begun = threading.Event()
        body = {"model": "m", "prompt": "x", "max_tokens": tokens, "stream": True}
        headers = {"Authorization": f"Bearer {CLIENT}"}
        more = {"json": body, "headers": headers, "timeout": 120}

        def read():
            url = f"{self.router}/v1/completions"
            with httpx.Client(trust_env=False) as client, client.stream("POST", url, **more) as answer:
                for line in answer.iter_lines():
                    came.append(line)
                    begun.set()
            begun.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(120)
        try:
            yield came
        finally:
            thread.join()


def new_site(folder):
    """Make the programs that the examples call, and the secrets, which their owner alone may read."""
    site = Site(folder, tuple(free_ports(3)))
    site.programs.mkdir()
    site.secrets.mkdir(mode=0o700)
    for name, text in SECRETS.items():
        (site.secrets / name).write_text(text)
        (site.secrets / name).chmod(0o400)
    program(site, "pdrelay", f'exec {sys.executable} -P -m pdrelay_proxy.cli "$@"')
    program(site, "vllm", f'exec {sys.executable} -P {ROOT}/tests/support/pretended_vllm.py "$@"')
    return site


def program(site, name, text):
    path = site.programs / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run(argv, environment, *, timeout=200):
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def processes_of(group):
    """Return the ids of the processes of a process group that have not ended."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _group_of(path) == group]


def _group_of(process):
    try:
        state, _, group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:  # it has ended
        return None
    return None if state == "Z" else int(group)


def command_lines(pid):
    """Return the arguments of a process, which every user of the machine can read; of one that has ended none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def secrets_in(words):
    """Return the secrets that stand in words."""
    return [secret for secret in (CLIENT, ENGINE, ADMIN, JOIN, CONNECTOR) if any(secret in word for word in words)]
