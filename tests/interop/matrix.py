"""Programs of others before our engines, and our router before theirs: ``make test-interop``, ``PEERS="smg nixl"``.

Each program is tried alone, with a prefill and a decode engine on this machine's CPUs, and with every property of
properties.py. What is seen goes to seen.json and from there to docs/interop.md. The exit code is 1 if a property does
not hold and no cause is known, or if one holds whose cause is known: the cause is out of date.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx

# As a script it has its own folder on the path, or none.
sys.path.insert(0, str(Path(__file__).parents[1]))

from interop import page
from interop.kinds import ENGINES
from interop.peer import Causes, Engines, Pair, Peer
from interop.properties import PROPERTIES
from interop.stage import Missed, Stage
from pdrelay_tools.local.errors import ChildFailed
from pdrelay_tools.local.model import ensure_model
from pdrelay_tools.local.processes import Child, Command, ProcessGroup, open_fleet
from pdrelay_tools.local.recipe import Connector, EngineSpec, Role, engine
from pdrelay_tools.proving.core.answer import Answer
from support import router_kind
from support import try_versions as versions
from support.cluster import ROOT, engine_spec, free_ports, router_command, start_engine

LOGS = ROOT / ".pdrelay/interop"
LOADS = "vllm:pdrelay_loads_total"
START_S = 300
PEERS: tuple[Peer, ...] = tuple(
    importlib.import_module(f"interop.peers.{path.stem}").PEER
    for path in sorted(Path(__file__).with_name("peers").glob("*.py"))
)


def main() -> int:
    """Try what the command line names; everything without names."""
    named = [*PEERS, *ENGINES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {' '.join(each.name for each in named)}; none: all")
    names = parser.parse_args().names
    if unknown := {*names} - {each.name for each in named}:
        parser.error(f"{', '.join(sorted(unknown))}: it has {' '.join(each.name for each in named)}")
    os.environ.setdefault(router_kind.CHOICE, "plain")
    model = ROOT / ".pdrelay/models/tiny"
    ensure_model(model)
    surprises: list[str] = []
    with open_fleet(LOGS) as fleet:
        reference = engine_spec("reference", model)
        fleet.wait_ready([start_engine(fleet, reference)], timeout_s=START_S)
        known: dict[str, Answer] = {}
        for each in named:
            if names and each.name not in names:
                continue
            print(each.name, flush=True)
            try:
                with staged(fleet, each, reference, known) as stage:
                    found = tried(stage)
            except ChildFailed as exc:
                found = {name: page.Cell(holds=False, note=f"does not start: {exc}") for name in PROPERTIES}
            surprises += surprising(each.name, found, each.causes)
            page.keep(each, found)
            page.write(PEERS, ENGINES)
    print("\n".join(surprises) or "all as the page says")
    return min(len(surprises), 100)


@contextmanager
def staged(
    fleet: ProcessGroup, each: Peer | Engines, reference: EngineSpec, known: dict[str, Answer]
) -> Iterator[Stage]:
    """Start two engines and what is before them; all of it ends with the block."""
    make = engine_before_peer if isinstance(each, Peer) else engine_of_others
    specs = [make(each, role, reference.model) for role in Role]
    own = each.engine if isinstance(each, Peer) else None
    other = each.vllm if isinstance(each, Engines) else None

    def start(spec: EngineSpec) -> Child:
        if own:
            return fleet.start(own(spec))
        if other:
            command = engine(spec, os.environ)
            return fleet.start(replace(command, argv=[str(versions.environment(other)), *command.argv[1:]]))
        return start_engine(fleet, spec)

    children = [start(spec) for spec in specs]
    try:
        fleet.wait_ready(children, timeout_s=START_S)
        ports = free_ports(2)
        pair = Pair(*specs, ports=(ports[0], ports[1]))
        command = program(each, pair)
        children.append(fleet.start(command))
        fleet.wait_ready(children[-1:], timeout_s=START_S)
        loads = LOADS if isinstance(each, Peer) else each.loads
        url = f"http://127.0.0.1:{ports[0]}"
        yield Stage(fleet, url, pair, children[0], start, own is None, reference, loads, known)
    finally:
        fleet.stop(*(child for child in fleet.children if child.name in {spec.name for spec in specs} | {each.name}))


def engine_before_peer(peer: Peer, role: Role, model: Path) -> EngineSpec:
    """Return an engine with our connector."""
    options = {"connector": Connector.PDRELAY, "extra_connector_config": peer.connector}
    spec = engine_spec(f"{peer.name}-{role.value}", model, role=role, **options)
    return configured(spec, peer.config(spec)) if peer.config else spec


def engine_of_others(kind: Engines, role: Role, model: Path) -> EngineSpec:
    """Return an engine with a connector of vLLM."""
    spec = engine_spec(f"{kind.name}-{role.value}", model, role=role, connector=Connector.NIXL)
    return configured(spec, kind.config(spec))


def configured(spec: EngineSpec, config: dict[str, object]) -> EngineSpec:
    """Return the engine with another --kv-transfer-config: the last one counts."""
    return replace(spec, extra_args=(*spec.extra_args, "--kv-transfer-config", json.dumps(config)))


def program(each: Peer | Engines, pair: Pair) -> Command:
    """Return how to start what stands before the engines: our router, or the peer."""
    if isinstance(each, Engines):
        return router_command(each.name, [pair.prefill], [pair.decode], port=pair.ports[0])
    argv = [str(word) for word in each.argv(pair)]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    url = f"http://127.0.0.1:{pair.ports[0]}{each.health}"
    return Command(each.name, argv, {**kept, "NO_PROXY": "*", **each.env}, url)


def tried(stage: Stage) -> dict[str, page.Cell]:
    """Try every property, one after another: an engine that is dead stays so for the next but the last."""
    found: dict[str, page.Cell] = {}
    for name, try_property in PROPERTIES.items():
        try:
            cell = page.Cell(holds=True, note=try_property(stage))
        except (Missed, httpx.HTTPError) as exc:
            cell = page.Cell(holds=False, note=f"{exc}" if isinstance(exc, Missed) else f"{type(exc).__name__}: {exc}")
        found[name] = cell
        print(f"  {name}: {'' if cell.holds else 'NO: '}{cell.note}", flush=True)
    return found


def surprising(name: str, found: dict[str, page.Cell], causes: Causes) -> list[str]:
    """Say what the page has no cause for, and which cause is out of date."""
    said = [f"{name}: {key}: {cell.note}" for key, cell in found.items() if not cell.holds and key not in causes]
    return said + [f"{name}: {key} holds, and a cause says why it does not" for key in causes if found[key].holds]


if __name__ == "__main__":
    sys.exit(main())
