"""What serving KV events costs an engine: CPU of its API server for each block, and its time to
first token.

``python -m benchmarks.connector.kv_events``: a table of CPU times, without an engine. With
``--engines``: two CPU engines at the same time, one of which serves its events to a reader; each
prompt goes to one and then to the other, so that whatever the machine does meanwhile meets both.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

import httpx
import msgspec

from benchmarks import page
from pdrelay_connector.core.kv_events.event_hub import KVEventHub
from pdrelay_tools.local.model import ensure_model
from pdrelay_tools.local.processes import open_fleet
from pdrelay_tools.local.recipe import engine
from support.cluster import ROOT, engine_spec
from support.proc import cpu_by_thread

SIZE = 16
PROMPTS = 200
ROUNDS = 5
CHUNKS = {"a prompt (128 blocks in one event)": 128, "answers (one block in one event)": 1}
WARM_UP = 20
LOGS = ROOT / ".pdrelay/logs/kv-events"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--engines", action="store_true", help="time to first token, on real engines"
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    if options.engines:
        engines(options)
    else:
        alone()


def alone():
    """Print the CPU times of the hub: what one API server process does for each block that its
    engine stores.
    """
    seen = {}
    for _ in range(ROUNDS):
        for what, value in (*blocks_of_kinds(), *memory()):
            seen.setdefault(what, []).append(value)
    print(f"median of {ROUNDS} rounds\n\n| | |\n|---|---|")
    for what, values in seen.items():
        print(f"| {what} | {statistics.median(values):.2f} |")


def blocks_of_kinds():
    for kind, chunk in CHUNKS.items():
        for readers in (0, 1, 4):
            yield f"µs of CPU for a block, {kind}, {readers} readers", cost(chunk, readers)
    hub = filled(KVEventHub(), batches(128))
    blocks = len(hub.blocks_of(0))
    began = time.process_time()
    drain(hub.join(lambda: None))
    yield (
        "µs of CPU for a block of the state, for a new reader",
        (time.process_time() - began) / blocks * 1e6,
    )


def cost(chunk, readers):
    hub = KVEventHub()
    payloads = batches(chunk)
    hub.add_rank(0)
    queues = [hub.join(lambda: None) for _ in range(readers)]
    began = time.process_time()
    for payload in payloads:
        hub.publish(0, payload)
        for queue in queues:
            drain(queue)
    return (time.process_time() - began) / len(hub.blocks_of(0)) * 1e6


def memory():
    payloads = batches(128)
    tracemalloc.start()
    hub = filled(KVEventHub(), payloads)
    yield "bytes of memory for a block", tracemalloc.get_traced_memory()[0] / len(hub.blocks_of(0))
    tracemalloc.stop()


def filled(hub, payloads):
    hub.add_rank(0)
    for payload in payloads:
        hub.publish(0, payload)
    return hub


def drain(queue):
    while queue.next_frame() is not None:
        pass


def batches(chunk):
    """Return what an engine publishes for prompts of 128 blocks: each step of it is an event."""
    dice = random.Random(1)
    payloads = []
    for _ in range(PROMPTS):
        parent = None
        for _ in range(128 // chunk):
            names = [dice.randbytes(32) for _ in range(chunk)]
            event = {
                "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "block_size": SIZE,
                "token_ids": [dice.randrange(150_000) for _ in range(chunk * SIZE)], "lora_id": None, "medium": "GPU",
                "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention",
            }  # fmt: skip
            payloads.append(msgspec.msgpack.encode([0.0, [event], 0]))
            parent = names[-1]
    return payloads


def engines(options):
    page.end_as_by_ctrl_c()
    LOGS.mkdir(parents=True, exist_ok=True)
    model = ROOT / ".pdrelay/models/tiny"
    ensure_model(model)
    with (
        tempfile.TemporaryDirectory(prefix="pdrelay-") as folder,
        open_fleet(LOGS) as fleet,
        httpx.Client() as http,
    ):
        both = {
            "without": engine_spec("without", model),
            "with": engine_spec("with", model, kv_events=Path(folder)),
        }
        children = {name: fleet.start(engine(spec, os.environ)) for name, spec in both.items()}
        fleet.wait_ready(list(children.values()), timeout_s=300)
        reader = threading.Thread(target=read, args=(both["with"].base_url,), daemon=True)
        reader.start()
        dice = random.Random(4)
        times = {name: [] for name in both}
        for number in range(options.requests + WARM_UP):
            if number == WARM_UP:
                began = {name: cpu(child) for name, child in children.items()}
            prompt = [dice.randrange(20, 500) for _ in range(options.tokens)]
            for name in list(both) if number % 2 else list(both)[::-1]:
                times[name].append(first_token(http, both[name].base_url, prompt))
        spent = {
            name: [b - a for a, b in zip(began[name], cpu(child), strict=True)]
            for name, child in children.items()
        }
    report(options, {name: found[WARM_UP:] for name, found in times.items()}, spent)


def cpu(child):
    """Return the CPU-seconds of the API server, which is the leader, and of the engine core, which
    it has started.
    """
    threads = cpu_by_thread(child)
    server = sum(seconds for (pid, _), seconds in threads.items() if pid == child.pid)
    return server, sum(threads.values()) - server


def read(url):
    with httpx.stream("GET", f"{url}/v1/pdrelay/kv_events", timeout=None) as answer:
        answer.raise_for_status()
        for _ in answer.iter_raw():
            pass


def first_token(http, url, prompt):
    """Return the milliseconds to the first token of an answer of two."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 2,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    began = time.monotonic()
    with http.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        answer.raise_for_status()
        pieces = answer.iter_lines()
        line = next(pieces)
        took = time.monotonic() - began
        for _ in pieces:
            pass
    json.loads(line.removeprefix("data: "))["choices"]
    return took * 1000


def report(options, times, spent):
    print(f"{options.requests} prompts of {options.tokens} tokens; ms to the first token\n")
    print(
        "| KV events | p25 | median | p75 | CPU of a request, ms: API server | its core "
        "|\n|---|---|---|---|---|---|"
    )
    for name, found in times.items():
        server, core = (1000 * seconds / options.requests for seconds in spent[name])
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"| {name} | {low:.2f} | {middle:.2f} | {high:.2f} | {server:.2f} | {core:.2f} |")
    difference = statistics.median(
        b - a for a, b in zip(times["without"], times["with"], strict=True)
    )
    print(f"\nmedian of each prompt's difference: {difference:.3f} ms")


if __name__ == "__main__":
    main()
