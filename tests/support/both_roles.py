"""Engines that can serve either role: they lend KV and take it in both directions, so streams and roles can move."""

from contextlib import contextmanager
from types import SimpleNamespace

from pdrelay_tools.local.recipe import Connector
from support.cluster import engine_spec, start_engine
from support.pacing import paced

BOTH = {
    "role": None,
    "connector": Connector.PDRELAY,
    "extra_connector_config": {"transfer_timeout": 10.0},
    "max_model_len": 4096,
    "kv_cache_mib": 512,
}
# Of their router. The times are long: only what is frozen or broken may take as long, and not a busy machine.
MOVES = ("--resume-streams", "true", "--health-check-interval", "0.5", "--stream-idle-timeout", "480")


@contextmanager
def both_engines(fleet, model, prefix, names, mode, *, step_s=0.0, **options):
    """Yield such engines: by their names, as a list ``specs``, and as ``named``; ``children`` may die.

    ``step_s``: the least time of a step. A stream then lasts longer than its reader takes, however busy the machine is.
    """
    made = {name: engine_spec(f"{prefix}-{mode}-{name}", model, mode=mode, **BOTH | options) for name in names}
    named = {name: paced(spec, step_s, 0, 0) for name, spec in made.items()} if step_s else made
    children = {name: start_engine(fleet, spec) for name, spec in named.items()}
    fleet.wait_ready(list(children.values()), timeout_s=300)
    yield SimpleNamespace(**named, named=named, specs=list(named.values()), mode=mode, children=children, fleet=fleet)
    fleet.stop(*[child for child in children.values() if child in fleet.children])
