"""Real engines on this machine that tell what they have cached, and routers in front of them."""

import json
from contextlib import contextmanager
from dataclasses import dataclass

from pdrelay_tools.local.recipe import Connector, Role
from support.cluster import base_url, engine_spec, metrics, router_command, start_engine

KEY = "only-for-this-benchmark"
BLOCK, MODEL_LENGTH = 32, 2048  # tokens
KV_BYTES = 2048  # of a token of the tiny model
COMPUTED, HIT = (
    "vllm:prompt_tokens_by_source_total|local_compute",
    "vllm:prompt_tokens_by_source_total|local_cache_hit",
)
KEYS = {"ADMIN_API_KEY": KEY, "PDRELAY_PREFILL_API_KEY": KEY, "PDRELAY_DECODE_API_KEY": KEY}

PREFIX = ("--prefill-policy", "prefix", "--decode-policy", "prefix", "--kv-events", "auto")
EXPECTED = (
    "--prefill-policy",
    "expected_ttft",
    "--decode-policy",
    "expected_ttft",
    "--kv-events",
    "auto",
)
ALONE = ("--min-split-new-bytes", "800")
ROUND_ROBIN = "round_robin"  # what the others are compared with
# Arguments of ``pdrelay serve`` by the name of the configuration. A name that ends in IDS has
# prompts of token ids, which the router finds among the blocks that engines tell of.
IDS = ", ids"
ROUTERS = {
    ROUND_ROBIN: (),
    "prefix": (*PREFIX, *ALONE),
    "prefix, ids": (*PREFIX, *ALONE),
    "prefix, split": PREFIX,
    "expected_ttft": (*EXPECTED, *ALONE),
}
USUAL = (ROUND_ROBIN, "prefix", "prefix, ids", "expected_ttft")


@dataclass
class Engines:
    """Prefill and decode engines: ``specs`` and ``children`` by name, p0, p1, ... and d0, d1,
    ...
    """

    specs: dict
    children: dict
    fleet: object
    blocks: int  # of each engine's cache

    def of(self, role):
        """Return the specs of one role, by its first letter."""
        return [spec for name, spec in self.specs.items() if name.startswith(role)]

    def counters(self):
        """Return prompt tokens that were computed or found in the own cache, by role and kind."""
        found = {name: metrics(spec) for name, spec in self.specs.items()}
        return {
            role: {
                kind: sum(found[name].get(key, 0.0) for name in found if name.startswith(role))
                for kind, key in KINDS
            }
            for role in "pd"
        }

    def stop(self, name):
        """End an engine with SIGTERM."""
        self.fleet.stop(self.children.pop(name))

    def start(self, name):
        """Start an engine again, and wait for it."""
        self.children[name] = start_engine(self.fleet, self.specs[name])
        self.fleet.wait_ready([self.children[name]], timeout_s=300)


KINDS = (("computed", COMPUTED), ("hit", HIT))


def spec_of(name, model, folder, *, blocks, role=None):
    """Return an engine with a cache of so many blocks, whose events only this user can follow."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/{name}-inproc.ipc",
        "replay_endpoint": f"ipc://{folder}/{name}-inproc-replay.ipc",
    }
    return engine_spec(
        name, model, block_size=BLOCK, max_model_len=MODEL_LENGTH, role=role, connector=Connector.PDRELAY,
        kv_cache_mib=-(-blocks * BLOCK * KV_BYTES // 2**20),
        extra_args=("--num-gpu-blocks-override", str(blocks), "--kv-events-config", json.dumps(events)),
        extra_env={"VLLM_API_KEY": KEY, "VLLM_PLUGINS": "pdrelay,pdrelay_kv_events"},
    )  # fmt: skip


@contextmanager
def engines_of(fleet, model, folder, *, prefill, decode, blocks):
    """Start engines, and end them with the block."""
    roles = {f"p{n}": Role.PREFILL for n in range(prefill)} | {
        f"d{n}": Role.DECODE for n in range(decode)
    }
    specs = {
        name: spec_of(name, model, folder, blocks=blocks, role=role) for name, role in roles.items()
    }
    engines = Engines(
        specs, {name: start_engine(fleet, spec) for name, spec in specs.items()}, fleet, blocks
    )
    try:
        fleet.wait_ready(engines.children.values(), timeout_s=300)
        yield engines
    finally:
        fleet.stop(*engines.children.values())


@contextmanager
def routers_of(fleet, engines, names):
    """Start a router of each configuration in front of the same engines; yields name -> URL."""
    commands = {
        name: router_command(
            f"router-{number}", engines.of("p"), engines.of("d"), env=KEYS, args=ROUTERS[name]
        )
        for number, name in enumerate(names)
    }
    children = [fleet.start(command) for command in commands.values()]
    try:
        fleet.wait_ready(children, timeout_s=60)
        yield {name: base_url(command) for name, command in commands.items()}
    finally:
        fleet.stop(*children)
