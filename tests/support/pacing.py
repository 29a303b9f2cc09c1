"""Engines whose steps take at least as long as on an accelerator of their own.

Engines of one machine share its cores, and then one that turns brings nothing: what it computes the others cannot. Here
each step sleeps until its time is over, so what an engine can do in a second is its own, and is about the same however
busy the cores are. Everything else is real: the scheduler, the KV cache, what moves, and every token.
"""

import dataclasses
import json
import os

from support.cluster import ROOT
from xpyd_proxy.local.recipe import transfer_config

PACE = "XPYD_TEST_PACE"  # seconds: of any step, of each prompt token in it, of each stream in it
FENCE_TOKENS = 211  # a prompt of exactly so many tokens has P answer late that its lease still holds,
FENCE_SECONDS = "XPYD_TEST_FENCE_SECONDS"  # by so long


def paced(spec, step_s, token_s, stream_s):
    """The same engine, in its own time."""
    config = transfer_config(spec) | {
        "kv_connector": "PacedConnector",
        "kv_connector_module_path": "support.paced_connector",
    }
    path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    return dataclasses.replace(
        spec,
        extra_env={**spec.extra_env, "PYTHONPATH": path, PACE: f"{step_s} {token_s} {stream_s}"},
        extra_args=(*spec.extra_args, "--kv-transfer-config", json.dumps(config)),
    )
