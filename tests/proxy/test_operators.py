"""What operators choose, and what they are told: against the port of a router process, as its clients meet it."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest

from support.router_process import RouterProcess, router_processes
from support.sim import serving, sims
from xpyd_proxy.local.sim import Sim

PATH = "/v1/completions"
BODY = {"prompt": "once upon a time", "max_tokens": 3}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@dataclass(frozen=True)
class Running:
    """A router process and the engines behind it."""

    router: RouterProcess
    engines: dict[str, Sim]
    at: dict[str, str]  # host:port of the engines

    def post(self, path=PATH, body=BODY, **options):
        return httpx.post(self.router.url + path, **{"json": body, "timeout": 30} | options)

    def get(self, path, **options):
        return httpx.get(self.router.url + path, timeout=30, **options)

    def legs(self):
        return [entry for sim in self.engines.values() for entry in sim.log if entry.path == PATH]


@contextmanager
def running(folder, *args, env=None, **options) -> Generator[Running]:
    engines = sims(**options)
    with ExitStack() as stack:
        at = {name: stack.enter_context(serving(sim)) for name, sim in engines.items()}
        known = ["--prefill", at["p0"], "--decode", at["d0"]]
        (router,) = stack.enter_context(router_processes(folder, 1, *known, *args, env=env))
        yield Running(router, engines, at)


@pytest.mark.parametrize("forwards", ["false", "true"])
def test_engines_see_the_key_of_a_client_only_if_the_operator_says_so(tmp_path, forwards):
    """It is a key of this router: who has it may ask here."""
    with running(tmp_path, "--forward-client-key", forwards) as fleet:
        answer = fleet.post(headers=bearer("client-key"))

        shown = {entry.headers.get("authorization") for entry in fleet.legs()}
    assert answer.status_code == 200
    assert shown == {"Bearer client-key" if forwards == "true" else None}
