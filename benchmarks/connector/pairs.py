"""The connectors that are compared, and pairs of engines that run with one of them."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.connector.models import POSITIONS
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.processes import open_fleet
from pdrelay_tools.local.recipe import Connector, EngineSpec, Role, transfer_config
from support.cluster import ROOT, engine_spec, metrics, start_engine, wait_until
from support.netns import DATA

LENGTHS = (256, 1024, 4096)  # tokens of a prompt
LEG_LENGTHS = (32, 256, 1500)  # the same, where only D's leg is measured
CHUNK = 512  # tokens of a prompt that one step computes
KV_CACHE_MIB = 256
LOGS = ROOT / ".pdrelay/logs/bench"
HITS = "vllm:external_prefix_cache_hits_total"  # tokens that D has not computed itself


@dataclass(frozen=True)
class Kind:
    """A connector and how it is set up."""

    name: str
    connector: Connector
    mode: TransferMode = TransferMode.PULL
    extra: tuple[tuple[str, object], ...] = ()

    @property
    def is_push(self):
        return self.mode is TransferMode.PUSH

    @property
    def slug(self):
        return self.name.replace(",", "").replace(" ", "-").lower()


PULL = Kind("pdrelay pull", Connector.PDRELAY)
PUSH = Kind("pdrelay push", Connector.PDRELAY, TransferMode.PUSH)
NIXL_PULL = Kind("NixlConnector", Connector.NIXL)
NIXL_PUSH = Kind("NixlPushConnector", Connector.NIXL, TransferMode.PUSH)
KINDS = (PULL, NIXL_PULL, NIXL_PUSH, PUSH)
LINKED = (PULL, NIXL_PUSH, PUSH)  # compared over a link


@dataclass
class Pair:
    """A prefill and a decode engine that run."""

    kind: Kind
    p: EngineSpec
    d: EngineSpec
    pids: tuple[int, int]
    stamps: Path
    send: Callable  # one request through both, from its prompt

    def exposed(self, name):
        """Return the seconds from a prompt being prefilled on P to it being runnable on D."""
        found = {}

        def complete():
            for event, when, request in map(json.loads, self.stamps.read_text().splitlines()):
                if request.startswith(f"cmpl-{name}-"):
                    found[event] = when
            return len(found) == 2

        wait_until(complete, seconds=5, what=f"both engines say what became of {name}")
        return found["runnable"] - found["prefilled"]

    @contextmanager
    def no_recompute(self, tokens):
        """Fail unless D gets so many tokens from P during the block: a prompt it computes itself is
        no transfer.
        """
        before = metrics(self.d).get(HITS, 0.0)
        yield
        # Of each prompt D may compute the last token itself, and say so or not.
        wait_until(
            lambda: metrics(self.d).get(HITS, 0.0) - before >= tokens,
            seconds=5,
            what=(
                f"{self.kind.name}: D takes over {tokens} tokens, not just "
                f"{metrics(self.d).get(HITS, 0.0) - before}"
            ),
        )


@contextmanager
def running(kind, model, client, prompt, *, hosts=(None, None), args=()):
    """Start a pair, have it serve some prompts, and stop it."""
    stamps = LOGS / f"{kind.slug}.stamps"
    LOGS.mkdir(parents=True, exist_ok=True)
    stamps.write_text("")
    with open_fleet(LOGS) as fleet:
        p, d = (
            _spec(kind, role, model, host, stamps, args)
            for role, host in zip(Role, hosts, strict=True)
        )
        children = [start_engine(fleet, spec) for spec in (p, d)]
        fleet.wait_ready(children, timeout_s=300)
        send = client.push if kind.is_push else client.pull
        pair = Pair(
            kind,
            p,
            d,
            tuple(child.pid for child in children),
            stamps,
            lambda each: send(pair, each),
        )
        client.meet(pair, prompt(CHUNK))  # first contact and first chunks, outside any measurement
        pair.send(prompt(2 * CHUNK))
        yield pair


def _spec(kind, role, model, host, stamps, args):
    elsewhere = dict(host.options) if host else {}
    if host:
        # vLLM's own takes all
        elsewhere["extra_env"] = {"UCX_NET_DEVICES": DATA, **elsewhere["extra_env"]}
    env = {
        "PYTHONPATH": str(ROOT),
        "PDRELAY_BENCH_STAMPS": str(stamps),
        **elsewhere.pop("extra_env", {}),
    }
    spec = engine_spec(
        f"{kind.slug}-{role.value}",
        model,
        role=role,
        connector=kind.connector,
        mode=kind.mode,
        max_model_len=POSITIONS,
        kv_cache_mib=KV_CACHE_MIB,
        extra_connector_config=dict(kind.extra),
        extra_env=env,
        **elsewhere,
    )
    config = transfer_config(spec) | {"kv_connector_module_path": "benchmarks.connector.stamped"}
    own = (
        "--max-num-batched-tokens",
        str(CHUNK),
        "--kv-transfer-config",
        json.dumps(config),
        *args,
    )
    return replace(spec, extra_args=(*spec.extra_args, *own))
