"""16 simulated engines under traffic that changes sides: every static split, and engines that turn.

``python -m benchmarks.replay.roles [--minutes 60] [NAME ...]``: names are ``8+8`` and the like,
``auto``, ``doubled`` (two controllers at the same time) and ``killed`` (each controller lives for
five minutes); without names all of them, which takes an hour of CPU. Prints a row for each: the
share of requests within both targets, in all and by phase, such requests a second, turns, and the
most turns in any hour.
"""

import argparse
import sys
import time

from pdrelay_proxy.features.roles.work_meter import RoleTargets
from pdrelay_tools.planning.engine_model import EngineModel
from pdrelay_tools.planning.replay.roles import RolesPlan
from pdrelay_tools.planning.replay.simulation import SimulatedFleet, replay
from pdrelay_tools.planning.replay.summary import Targets
from pdrelay_tools.planning.replay.traces import Phase, phased_trace

# A slow engine: a request takes as long as many do on a fast one, so an hour has few enough of them
# to simulate.
ENGINE = EngineModel(
    step_s=0.04, prefill_token_s=5e-4, prefill_context_s=1e-8, decode_request_s=1e-3, decode_context_s=1e-6,
    max_num_batched_tokens=4096, kv_tokens=100_000, link_bytes_per_s=2e9, jitter=0.1,
)  # fmt: skip
TARGETS = Targets(ttft_s=8.0, itl_s=0.1)
# requests a second, mean tokens of prompts and of answers
PROMPTS, ANSWERS = (3.6, 4000, 60), (3.2, 1500, 500)
ENGINES, SEED = 16, 1
NAMES = (
    *[f"{prefill}+{ENGINES - prefill}" for prefill in range(5, 13)],
    "auto",
    "doubled",
    "killed",
)


def fleet_of(name):
    """Return the engines of a row."""
    if "+" in name:
        prefill, decode = map(int, name.split("+"))
        return SimulatedFleet(prefill, decode, ENGINE)
    options = {"doubled": {"controllers": 2}, "killed": {"dies_every_s": 300.0}}.get(name, {})
    plan = RolesPlan(RoleTargets(TARGETS.ttft_s, TARGETS.itl_s), **options)
    return SimulatedFleet(ENGINES // 2, ENGINES // 2, ENGINE, roles=plan)


def trace_of(minutes):
    """Return prompts, answers, and prompts again."""
    return phased_trace(
        [Phase(minutes * 60, *kind) for kind in (PROMPTS, ANSWERS, PROMPTS)], 64, SEED
    )


def is_good(one):
    """Tell whether a request kept both targets."""
    return one.ttft_s <= TARGETS.ttft_s and one.itl_s <= TARGETS.itl_s


def row(name, minutes):
    """Return the cells of a row."""
    found = replay(trace_of(minutes), "least_loaded", fleet_of(name), seed=SEED)
    served = found.served
    assert all(one.ended > 0 for one in served), "a request was lost"
    parts = [[one for one in served if at <= one.came / (minutes * 60) < at + 1] for at in range(3)]
    shares = [sum(map(is_good, part)) / len(part) for part in (served, *parts)]
    per_s = sum(map(is_good, served)) / (3 * minutes * 60)
    began = [one.began for one in found.turned]
    most = max((sum(at - 3600 < each <= at for each in began) for at in began), default=0)
    return [name, *[f"{share:.1%}" for share in shares], f"{per_s:.2f}", str(len(began)), str(most)]


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="of each phase (%(default)s)")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    args = parser.parse_args()
    print(
        "| | within targets | prompts | answers | prompts | such requests/s | turns | most in an "
        "hour |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in args.names:
        began = time.process_time()
        print("| " + " | ".join(row(name, args.minutes)) + " |", flush=True)
        print(f"{name}: {time.process_time() - began:.0f} s of CPU", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
