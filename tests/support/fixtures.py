"""Engines are started once and shared by all end-to-end tests: five of them need a minute and 8 GB."""

from types import SimpleNamespace

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.model import ensure_model
from pdrelay_tools.local.processes import open_fleet
from pdrelay_tools.local.recipe import Connector, Role
from support.cluster import ROOT, base_url, engine_spec, router_command, start_engine
from support.questions import ask, client

ADMIN_KEY = "an admin key of the tests"


@pytest.fixture(scope="session")
def model():
    directory = ROOT / ".pdrelay/models/tiny"
    ensure_model(directory)
    return directory


@pytest.fixture(scope="session")
def fleet(tmp_path_factory):
    """Whatever is started in it has ended when the tests end, however they end."""
    with open_fleet(tmp_path_factory.mktemp("logs")) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def reference(fleet, model):
    """An engine without any connector: what it answers is right."""
    spec = engine_spec("reference", model)
    fleet.wait_ready([start_engine(fleet, spec)], timeout_s=300)
    return spec


@pytest.fixture(scope="session")
def engines(fleet, model, reference):
    """Two prefill and two decode engines with our connector, and the reference."""
    specs = {
        **{f"p{i}": engine_spec(f"p{i}", model, role=Role.PREFILL, connector=Connector.PDRELAY) for i in (0, 1)},
        **{f"d{i}": engine_spec(f"d{i}", model, role=Role.DECODE, connector=Connector.PDRELAY) for i in (0, 1)},
    }
    children = {name: start_engine(fleet, spec) for name, spec in specs.items()}
    fleet.wait_ready(children.values(), timeout_s=300)
    return SimpleNamespace(**specs, reference=reference, pids={name: child.pid for name, child in children.items()})


@pytest.fixture(scope="session")
def pushing(fleet, model):
    """Two prefill engines that push, and two decode engines.

    The prefill engines compute 256 tokens a step, and 64 of a prompt where others wait; their cache is small.
    """
    common = {"connector": Connector.PDRELAY, "mode": TransferMode.PUSH}
    args = ("--max-num-batched-tokens", "256", "--long-prefill-token-threshold", "64")
    prefill = {"role": Role.PREFILL, "kv_cache_mib": 16, "extra_args": args, **common}
    specs = {name: engine_spec(f"push-{name}", model, **prefill) for name in ("p0", "p1")}
    specs |= {name: engine_spec(f"push-{name}", model, role=Role.DECODE, **common) for name in ("d0", "d1")}
    children = [start_engine(fleet, spec) for spec in specs.values()]
    fleet.wait_ready(children, timeout_s=300)
    yield SimpleNamespace(**specs, decode_pid=children[2].pid)
    fleet.stop(*children)


def _start_router(fleet, name, prefill, decode, **options):
    """Start our router in front of some engines; return its process and its URL."""
    command = router_command(name, prefill, decode, **options)
    child = fleet.start(command)
    fleet.wait_ready([child], timeout_s=30)
    return child, base_url(command)


@pytest.fixture(scope="module")
def start_router(fleet):
    """Start our router in front of some engines and return its URL; it ends with the tests of a module.

    Forty routers that nobody asks any more would take a quarter of a core with their probes.
    """
    started = []

    def start(*args, **options):
        child, url = _start_router(fleet, *args, **options)
        started.append(child)
        return url

    yield start
    fleet.stop(*(child for child in started if child in fleet.children))


@pytest.fixture(scope="session")
def one_pair(fleet, engines):
    """1P1D."""
    _, url = _start_router(fleet, "router-1p1d", [engines.p0], [engines.d0], env={"ADMIN_API_KEY": ADMIN_KEY})
    return url


@pytest.fixture(scope="session")
def two_pairs(fleet, engines):
    """2P2D."""
    _, url = _start_router(fleet, "router-2p2d", [engines.p0, engines.p1], [engines.d0, engines.d1])
    return url


@pytest.fixture(scope="session")
def reference_answer(reference):
    """Ask the engine without any connector; each question once."""
    known = {}
    with client(reference.base_url) as api:

        def answer(question):
            key = repr(question)
            if key not in known:
                known[key] = ask(api, question)
            return known[key]

        yield answer
