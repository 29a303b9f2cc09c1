"""What the router's canaries cost a prefill engine, beside what its own requests cost it: CPU time of real CPU engines.

``nice .venv/bin/python tests/benchmarks/connector/canaries.py`` prints the table of docs/verify.md. A prefill engine, a
decode engine and two routers in front of them, of which one repeats each request. Both get requests in turn, in
rounds, one after the other; what the engines use at rest is taken off. CPU time is that of the process and all that it
has started.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests")]

from benchmarks.connector.models import tiny_model, wide_model  # noqa: E402
from pdrelay_proxy.local.processes import open_fleet  # noqa: E402
from pdrelay_proxy.local.recipe import Connector, Role  # noqa: E402
from support.cluster import base_url, engine_spec, router_command, start_engine, wait_until  # noqa: E402
from support.proc import cpu_seconds  # noqa: E402

LOGS = ROOT / ".pdrelay/logs/canaries"
NAMES = ("prefill engine", "decode engine", "both")
EVERY = 1000  # the setting that docs/verify.md advises


def main():
    options = arguments()
    LOGS.mkdir(parents=True, exist_ok=True)
    model, args = (tiny_model(), ()) if options.model == "tiny" else (wide_model(), ("--load-format", "dummy"))
    with open_fleet(LOGS) as fleet:
        specs = [
            engine_spec(f"canary-{role.value}", model, role=role, connector=Connector.PDRELAY, extra_args=args)
            for role in Role
        ]
        engines = [start_engine(fleet, spec) for spec in specs]
        fleet.wait_ready(engines, timeout_s=300)
        commands = [
            router_command(f"canary-router-{every}", specs[:1], specs[1:], args=("--canary-every", str(every)))
            for every in (0, 1)
        ]
        routers = [fleet.start(command) for command in commands]
        fleet.wait_ready(routers, timeout_s=60)
        with httpx.Client(timeout=300, trust_env=False) as client:
            plain, repeating = (base_url(command) for command in commands)
            warm(client, plain, repeating, options)
            at_rest = idle(engines)
            rounds = [
                (
                    measured(client, plain, engines, at_rest, options),
                    measured(client, repeating, engines, at_rest, options, repeats=True),
                )
                for _ in range(options.rounds)
            ]
            counted = canaries(client, repeating)
    report(options, rounds, counted)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "wide"), default="wide")
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def warm(client, plain, repeating, options):
    """Have the engines meet, and everything computed once."""
    for _ in range(3):
        ask(client, plain, options)
        ask(client, repeating, options, repeats=True)


def ask(client, url, options, *, repeats=False):
    """Stream an answer, and wait until its canary is over."""
    known = sum(canaries(client, url).values())
    prompt = [random.randrange(260, 512) for _ in range(options.tokens)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": options.answer, "ignore_eos": True, "temperature": 0}
    response = client.post(f"{url}/v1/completions", json=body | {"stream": True})
    assert response.text.endswith("data: [DONE]\n\n"), response.text[-300:]
    if repeats:
        wait_until(lambda: sum(canaries(client, url).values()) > known, seconds=60, what="the canary is over")


def canaries(client, url):
    """Return how many requests a router has repeated, by how the texts compare."""
    lines = client.get(f"{url}/metrics").text.splitlines()
    return {
        line.split('"')[1]: float(line.split(" ")[1]) for line in lines if line.startswith("pdrelay_canaries_total{")
    }


def idle(children, seconds=5.0):
    """Return the share of a core that each process uses while nothing is asked."""
    before, start = [cpu_seconds(child.pid) for child in children], time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - start
    return [(cpu_seconds(child.pid) - then) / took for child, then in zip(children, before, strict=True)]


def measured(client, url, children, at_rest, options, *, repeats=False):
    """Return the CPU seconds of a request for each process, with those of its canary if this router ``repeats`` it."""
    before, start = [cpu_seconds(child.pid) for child in children], time.monotonic()
    for _ in range(options.requests):
        ask(client, url, options, repeats=repeats)
    took = time.monotonic() - start
    used = [cpu_seconds(child.pid) - then for child, then in zip(children, before, strict=True)]
    own = [(each - share * took) / options.requests for each, share in zip(used, at_rest, strict=True)]
    return [*own, sum(own)]


def report(options, rounds, counted):
    print(
        f"{options.model} model, prompts of {options.tokens} tokens, answers of {options.answer}; canaries: {counted}\n"
    )
    print(f"| CPU | a request | a canary | one in {EVERY:,} |\n|---|---|---|---|")
    for place, name in enumerate(NAMES):
        alone, repeated = ([each[which][place] for each in rounds] for which in (0, 1))
        request = statistics.median(alone)
        canary = statistics.median(with_it - without for with_it, without in zip(repeated, alone, strict=True))
        share = canary / request / EVERY
        print(f"| {name} | {1e3 * request:.1f} ms | {1e3 * canary:.1f} ms | {100 * share:.2f} % |")


if __name__ == "__main__":
    main()
