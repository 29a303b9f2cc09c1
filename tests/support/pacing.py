"""Engines whose steps take at least as long as on an accelerator of their own.

Engines of one machine share its cores, and then one that turns brings nothing: what it computes the others cannot. Here
each step sleeps until its time is over, so what an engine can do in a second is its own, and is about the same however
busy the cores are. Everything else is real: the scheduler, the KV cache, what moves, and every token.

A prompt may also name one thing over which one of its engines takes :data:`SLOW_S` longer: :func:`slow_prompt`.
"""

import dataclasses
import json
import os

from pdrelay_proxy.core.model import Role
from pdrelay_tools.local.recipe import transfer_config
from support.cluster import ROOT

PACE = "PDRELAY_TEST_PACE"  # seconds: of any step, of each prompt token in it, of each stream in it
SLOW_S = 0.2
SLOW_ROWS = (  # of ``pdrelay why``
    "API server",
    "wait in the queue",
    "allocate blocks",
    "order to the worker",
    "read KV",
    "write KV",
    "fence",
    "wait for a step",
    "compute",
    "decode",
)
_SLOW, _ROLES, _FIRST = 5, tuple(Role), 10  # the first token of such a prompt; the next ones say whose row it is


def slow_prompt(role, row, number):
    """Return a prompt over which an engine of this role is slow; those of two numbers begin with different blocks."""
    named = (_SLOW, _FIRST + _ROLES.index(role), _FIRST + SLOW_ROWS.index(row))
    return [*named, *(100 + (number * 37 + each) % 300 for each in range(40))]


def slow_row(prompt, role):
    """Return the row in which an engine of this role takes longer over a prompt; None if it does not."""
    if len(prompt) < 3 or prompt[0] != _SLOW or prompt[1] != _FIRST + _ROLES.index(role):
        return None
    number = prompt[2] - _FIRST
    return SLOW_ROWS[number] if 0 <= number < len(SLOW_ROWS) else None


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
