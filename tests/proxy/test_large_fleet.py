"""A change in a fleet of 2,000 engines keeps no request waiting for long."""

import json

import pytest

from support import large_fleet
from support.measuring import said_by

pytestmark = pytest.mark.processes


MOST_S = 0.01
LISTS = {"list", "relist", "store", "entry", "status", "metrics"}
MOST_OF_LISTS_S = 0.005
STEPS = {"choice", "pod", "failure", *LISTS}


@pytest.mark.slow  # it starts a process, in which 60 pods are replaced
async def test_no_step_of_the_loop_takes_10_ms_while_a_fleet_of_2000_engines_changes(capsys):
    """Promised in docs/benchmarks/fleet.md: so long a request, or a token of a stream, waits at most.

    Measured are a choice of two engines (each is the first after a change, for one of 100 adapters), a pod that is
    replaced, an engine that fails, and, at most 5 ms each, the steps of a first LIST of all pods, of one that differs
    in one, of a first view of a store of all engines, of one in which one is another, and of ``/stats`` and
    ``/metrics``; beside them probes, and the comparing of all engines with what sources say (tasks without a name,
    those of one kind together). A process of its own measures processor time. A step takes longer while others use the
    caches: the median of the nine longest counts, divided by how much slower than at best the same look at all engines
    is meanwhile.
    """
    found = json.loads(await said_by(large_fleet))
    longest = {name: steps[len(steps) // 2] / found["slowdown"] for name, steps in found["longest"].items()}
    with capsys.disabled():
        print(f" (slowdown {found['slowdown']:.1f})", end="")
        print("".join(f" {name} {longest[name] * 1000:.1f}" for name in sorted(STEPS)), "ms", end="")

    assert longest.keys() >= STEPS
    assert {name: took for name, took in longest.items() if took >= MOST_S} == {}
    assert {name: longest[name] for name in LISTS if longest[name] >= MOST_OF_LISTS_S} == {}
