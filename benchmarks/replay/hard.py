"""Loads that tell policies apart (docs/replay.md): a rush, a prefill engine half as fast, prompts
of 100,000 tokens.

``python -m benchmarks.replay.hard [POLICY]...`` prints a row for each; a minute of CPU for each
policy.
"""

import random
import sys

import msgspec

from pdrelay_proxy.core.model import Role
from pdrelay_tools.planning.engine_model import EngineModel
from pdrelay_tools.planning.replay.simulation import SimulatedFleet, replay
from pdrelay_tools.planning.replay.summary import Targets, summarise
from pdrelay_tools.planning.replay.traces import BlockNames, Conversations, Trace, Turn, poisson

POLICIES = ("round_robin", "power_of_two", "session", "prefix", "expected_ttft")
HALF = msgspec.structs.replace(
    EngineModel(), step_s=0.016, prefill_token_s=1e-4, prefill_context_s=2.6e-9
)


def prompts(count, per_s, mean, long=()):
    """Prompts that have nothing in common, of 50 tokens and an exponentially distributed number
    more.
    """
    chance = random.Random(1)
    names = BlockNames(0)
    turns = []
    for number, at_s in zip(range(count), poisson(per_s, 3), strict=False):
        size = 100_000 if number in long else 50 + int(chance.expovariate(1 / mean))
        output = 1 + int(chance.expovariate(1 / 100))
        turns.append(
            Turn(f"r{number}", names.new_names(-(-(size + output) // 16)), size, output, at_s)
        )
    return Trace(16, turns)


LOADS = {
    "rush": (
        Conversations(500, 8, 12.0, 1.0, 1000, 500, 200).generate(16, 0),
        SimulatedFleet(4, 4),
    ),
    "long prompts": (prompts(2000, 20.0, 500, long=(500, 1200)), SimulatedFleet(4, 4)),
    "half as fast": (prompts(4000, 45.0, 1000), SimulatedFleet(4, 4, odd_model=HALF)),
    "half as fast, full": (prompts(4000, 60.0, 1000), SimulatedFleet(4, 4, odd_model=HALF)),
}


def main(policies):
    """Print a row for each load and policy."""
    print(f"{'':36}  TTFT p50     p95     p99   ITL p99  uneven P     D  busy P, s")
    for name, (trace, fleet) in LOADS.items():
        for policy in policies:
            found = replay(trace, policy, fleet, seed=0)
            row = summarise(found, Targets())
            times = "".join(
                f"{1e3 * value:8.0f}" for value in (row.ttft_p50, row.ttft_p95, row.ttft_p99)
            )
            busy = " ".join(
                f"{log.busy_s:.0f}" for role, log in found.engines if role is Role.PREFILL
            )
            uneven = f"{row.prefill_unevenness:10.2f}{row.decode_unevenness:6.2f}"
            print(
                f"{name:20}{policy:18}{times}{1e3 * row.itl_p99:10.1f}{uneven}  {busy}", flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1:] or POLICIES)
