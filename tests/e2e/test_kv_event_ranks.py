"""KV events of data parallel ranks behind several API servers, as ``vllm serve`` starts them: each rank by itself."""

import itertools
import json
import os
import re
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from pdrelay_tools.local.processes import Command
from pdrelay_tools.local.recipe import environment, kv_events_config, options
from support.cluster import MODEL_NAME, engine_spec, wait_until
from support.kv_event_follower import Follower
from support.shapes import random_questions

# Two ranks and two API servers: five processes that import vLLM, a minute on two cores.
pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(600)]

RANKS = SERVERS = 2
PATH = "/v1/pdrelay/kv_events"
KEY = "only-for-this-test"
HEADERS = {"authorization": f"Bearer {KEY}"}
BLOCKS, SIZE = 40, 32
# As the program `vllm serve` does it, which asks for the version of a distribution that the CPU build has not.
SERVE = """
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
ServeSubcommand.cmd(make_arg_parser(FlexibleArgumentParser()).parse_args())
"""
_markers = itertools.count(1)


@pytest.fixture(scope="module")
def engine(fleet, model):
    with tempfile.TemporaryDirectory(prefix="pdrelay-") as folder:
        spec = engine_spec(
            "event-ranks", model, block_size=SIZE, max_model_len=1024,
            extra_args=(
                "--data-parallel-size", str(RANKS), "--api-server-count", str(SERVERS), "--enable-prefix-caching",
                "--num-gpu-blocks-override", str(BLOCKS),
                "--kv-events-config", json.dumps(kv_events_config(Path(folder), "events")),
            ),
            extra_env={
                "VLLM_API_KEY": KEY, "VLLM_PLUGINS": "pdrelay,pdrelay_kv_events", "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            },
        )  # fmt: skip
        argv = [sys.executable, "-P", "-c", SERVE, "--model", str(spec.model), *options(spec)]
        child = fleet.start(Command(spec.name, argv, environment(spec, os.environ), f"{spec.base_url}/health"))
        fleet.wait_ready([child], timeout_s=400)
        started = "Application startup complete"
        wait_until(lambda: child.log.read_text().count(started) == SERVERS, seconds=60, what="both servers serve")
        yield spec
        fleet.stop(child)


def cached(spec, rank, prompt):
    """Ask a rank for one token, and return how many of the prompt's were cached there."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    headers = HEADERS | {"x-data-parallel-rank": str(rank)}
    answer = httpx.post(f"{spec.base_url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def mark(spec):
    """Have each rank cache a block of its own, that of no other prompt, and return these prompts."""
    prompts = []
    for rank in range(RANKS):
        number = next(_markers)
        prompts.append([20 + (number * place + place * place) % 470 for place in range(1, SIZE + 2)])
        assert cached(spec, rank, prompts[rank]) == 0
    return prompts


def prompts_of(seed):
    """Return prompts of twice the blocks that a rank has; some begin alike."""
    prompts = [list(question.prompt) for question in random_questions([40 + 23 * n for n in range(10)], seed=seed)]
    return [*prompts, prompts[5][:70] + prompts[2][:60], *prompts[4:]]


def metric(spec, name):
    """Return an engine's metric by its label ``engine``, or by "" if it has none."""
    text = httpx.get(f"{spec.base_url}/metrics", headers=HEADERS, timeout=10).text
    found = re.findall(rf"^vllm:pdrelay_kv_events_{name}(?:{{([^}}]*)}})? ([\d.e+]+)$", text, re.MULTILINE)
    return {"".join(re.findall(r'engine="(\d+)"', labels)): float(value) for labels, value in found}


def test_each_rank_has_what_its_events_say(engine):
    """Whichever API server a reader reaches: both know all of both ranks."""
    with ExitStack() as stack:
        # The kernel spreads connections over the servers: that eight are at one happens once in 128 times.
        readers = [stack.enter_context(closing(Follower(engine.base_url + PATH, HEADERS, SIZE))) for _ in range(8)]
        found = []
        for number, prompt in enumerate(prompts_of("ranks")):
            rank = number % RANKS
            markers = mark(engine)
            for each in range(RANKS):
                readers[0].wait(markers[each], each)
            found.append((readers[0].hit(prompt, rank), cached(engine, rank, prompt)))
        markers = mark(engine)
        for rank, reader in itertools.product(range(RANKS), readers):
            reader.wait(markers[rank], rank)
        names = [[reader.reader.names(rank) for rank in range(RANKS)] for reader in readers]
        counted = metric(engine, "readers")[""]

    assert [said for said, _ in found] == [hit for _, hit in found]
    assert sum(hit for _, hit in found) > 0
    assert names == [names[0]] * len(readers)
    assert names[0][0] != names[0][1]
    assert counted == len(readers)
    wait_until(
        lambda: metric(engine, "blocks") == {str(rank): len(names[0][rank]) for rank in range(RANKS)},
        seconds=20, what="both ranks' blocks are in the metrics of either server",
    )  # fmt: skip
    assert metric(engine, "forgotten_total")[""] == 0


def test_the_router_knows_what_each_rank_has(engine, start_router):
    """By rank: the ranks are engines of their own to it."""
    keys = {"ADMIN_API_KEY": KEY, "PDRELAY_PREFILL_API_KEY": KEY, "PDRELAY_DECODE_API_KEY": KEY}
    args = ("--kv-events", "auto", "--prefill-policy", "prefix")
    ranks = [SimpleNamespace(address=f"{engine.address}#dp={RANKS}")]
    url = start_router("router-event-ranks", ranks, ranks, args=args, env=keys)

    def told(prompt):
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1}
        question = {"path": "/v1/completions", "body": body}
        answer = httpx.post(f"{url}/instances/explain", json=question, headers={"x-api-key": KEY}, timeout=10)
        assert answer.status_code == 200, answer.text
        found = answer.json()["cached_tokens"]
        return [found.get(f"prefill-{rank}") for rank in range(RANKS)]

    found = []
    for number, prompt in enumerate(prompts_of("router")):
        rank = number % RANKS
        for each, marker in enumerate(mark(engine)):
            wait_until(lambda e=each, m=marker: told(m)[e] == SIZE, seconds=20, what="the router knows all")
        found.append((told(prompt)[rank], cached(engine, rank, prompt)))

    assert [said for said, _ in found] == [hit for _, hit in found]
    assert sum(hit for _, hit in found) > 0
