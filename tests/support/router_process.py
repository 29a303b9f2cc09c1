"""Routers as processes of their own, as a Deployment runs them."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import httpx

from support import nursery
from support.sim import until

KEY = {"X-Api-Key": "sesame"}
OF_LIBRARIES = ("GLIBC_", "LD_", "MALLOC_", "OPENSSL_", "PYTHON", "SSL_")  # read when a program starts or imports


class RouterProcess:
    """One router; ``said`` is its log.

    It is forked from a process that has imported it (``support.nursery``). ``within``: a command that runs it in
    surroundings of its own; that one, and one for whose libraries the environment has something, imports it anew.
    """

    running = r"running on (https?://127.0.0.1:\d+)"  # what it says when it listens

    def __init__(
        self,
        log: Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
        descriptors: tuple[int, int] | None = None,
    ) -> None:
        self._log = log
        own = {"ADMIN_API_KEY": KEY["X-Api-Key"], **(env or {})}
        environment = os.environ | own
        words = ("serve", "--port", "0", *args)
        self.child: subprocess.Popen[bytes] | nursery.Borne
        if not within and not any(name.startswith(OF_LIBRARIES) for name in own):
            self.child = nursery.start_router(words, environment, log, descriptors=descriptors)
            return
        assert descriptors is None
        with log.open("w") as file:
            argv = [*within, sys.executable, "-m", "pdrelay_proxy.cli", *words]
            self.child = subprocess.Popen(argv, stderr=file, stdout=file, env=environment)

    def started(self) -> Self:
        """Wait until it listens."""
        until(lambda: self._found() is not None or self.child.poll() is not None, seconds=60)
        assert self._found() is not None, self.said
        return self

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def url(self) -> str:
        found = self._found()
        assert found is not None
        return found[1]

    def _found(self) -> re.Match[str] | None:
        return re.search(self.running, self.said)

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()


@contextmanager
def router_processes(
    folder: Path, count: int, *args: str, env: Mapping[str, str] | None = None
) -> Generator[list[RouterProcess]]:
    """Start so many at the same time; what is left of them at the end is killed."""
    with ExitStack() as stack:
        routers = []
        for number in range(count):
            routers.append(RouterProcess(folder / f"router-{number}.log", *args, env=env))
            stack.callback(routers[-1].kill)
        yield [router.started() for router in routers]


async def rows_of(client: httpx.AsyncClient, url: str) -> list[dict[str, object]]:
    """Return what a router says of its instances."""
    return (await client.get(f"{url}/instances", headers=KEY)).json()["instances"]
