"""What classes of requests are worth in overload (docs/slo.md): chats and batch jobs, more than engines can compute.

``python benchmarks/replay/classes.py [POLICY]...`` prints a row for each load, policy and class; some minutes.
"""

import random
import sys

from pdrelay_proxy.planning.replay.simulation import SimulatedFleet, replay
from pdrelay_proxy.planning.replay.summary import Targets, summarise
from pdrelay_proxy.planning.replay.traces import BlockNames, Trace, Turn
from pdrelay_proxy.settings import Settings

POLICIES = ("round_robin", "expected_ttft")
SECONDS = 60
TOKENS_PER_S = 66_000  # of prompts of this length that four engines compute, measured with this script
TTFT_S, ITL_S = 0.5, 0.05
SHORT, LONG = 500, 3000  # tokens of prompts, on the mean, exponentially distributed
LOADS = {"0.7 x": (0.3, 0.4), "1.5 x": (0.4, 1.1), "1.5 x, chats alone": (1.5, 0.0)}  # of that: chats, batch
RULES = {
    "no classes": None,
    "queue": Settings(classes=(f"chat:ttft={TTFT_S},itl={ITL_S}", "batch:rank=9,max_wait=3600"), default_class="chat"),
    "refuse": Settings(
        classes=(f"chat:ttft={TTFT_S},itl={ITL_S},on_miss=refuse", "batch:rank=9,max_wait=3600"), default_class="chat"
    ),
}


def mixed(chats, batch, *, seed=1):
    """Independent requests of both classes for a minute, in shares of what the engines can compute."""
    chance, names, turns = random.Random(seed), BlockNames(0), []
    for name, share, mean, answer in (("chat", chats, SHORT, 150), ("batch", batch, LONG, 100)):
        at_s = 0.0
        while share and (at_s := at_s + chance.expovariate(share * TOKENS_PER_S / mean)) < SECONDS:
            size, output = 20 + int(chance.expovariate(1 / mean)), 2 + int(chance.expovariate(1 / answer))
            turns.append((at_s, name, size, output))
    return Trace(
        16,
        [
            Turn(f"r{number}", names.take(-(-(size + output) // 16)), size, output, at_s, service_class=name)
            for number, (at_s, name, size, output) in enumerate(sorted(turns))
        ],
    )


def main(policies):
    """Print the rows."""
    targets = {"chat": Targets(TTFT_S, ITL_S), "batch": Targets()}
    print(f"{'load':20}{'policy':16}{'rules':12}class  requests   good refused  TTFT p50     p95  tokens/s  all, s")
    for load, shares in LOADS.items():
        trace = mixed(*shares)
        for policy in policies:
            for rules, settings in RULES.items():
                row = summarise(
                    replay(trace, policy, SimulatedFleet(4, 4, classes=settings), seed=0), Targets(), targets
                )
                for one in row.classes:
                    if one.requests:
                        times = "".join(
                            f"{'-' if s is None else f'{s:.2f} s':>9}" for s in (one.ttft_p50, one.ttft_p95)
                        )
                        print(
                            f"{load:20}{policy:16}{rules:12}{one.name:6}{one.requests:9}{one.good:7.1%}{one.refused:8.1%}"
                            f"{times}{one.tokens_per_s:10,.0f}{row.seconds:8.0f}",
                            flush=True,
                        )


if __name__ == "__main__":
    main(sys.argv[1:] or POLICIES)
