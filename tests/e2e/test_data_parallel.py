"""Two data-parallel ranks on either side: each meets each, and the router spreads its requests over all of them."""

import re
from collections import Counter
from itertools import product
from types import SimpleNamespace

import httpx
import pytest

from pdrelay_tools.local.recipe import Connector, Role
from support.cluster import MODEL_NAME, engine_spec, start_engine, wait_until
from support.legs import OPEN, plain, prompt_of
from support.questions import compare, questions

# Two engines of two ranks each: 40 s, and a rank is to the connector an engine like any other.
pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(600)]

RANKS = 2


@pytest.fixture(scope="module")
def pair(fleet, model):
    options = {
        "connector": Connector.PDRELAY,
        "extra_args": ("--data-parallel-size", str(RANKS)),
        "extra_env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},  # each rank is a process
    }
    specs = [engine_spec(f"dp-{role.value}", model, role=role, **options) for role in (Role.PREFILL, Role.DECODE)]
    children = [start_engine(fleet, spec) for spec in specs]
    fleet.wait_ready(children, timeout_s=300)
    yield SimpleNamespace(p=specs[0], d=specs[1])
    fleet.stop(*children)


def by_rank(spec, name):
    """Return a counter or a gauge of each rank of an engine."""
    text = httpx.get(f"{spec.base_url}/metrics", timeout=10).text
    found = re.findall(rf'^vllm:pdrelay_{name}(?:_total)?{{[^}}]*engine="(\d)"[^}}]*}} ([\d.e+]+)$', text, re.MULTILINE)
    return Counter({int(rank): float(value) for rank, value in found})


def rest(p):
    """Wait until no rank holds a lease: the step that publishes that publishes all that was counted of leases."""
    wait_until(lambda: not any(by_rank(p, "leases_held").values()), seconds=20, what="all leases are over")


def complete(spec, rank, prompt, params, tokens):
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "kv_transfer_params": params,
    }  # fmt: skip
    headers = {"X-data-parallel-rank": str(rank)}
    answer = httpx.post(f"{spec.base_url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_rank_loads_from_each(pair, reference):
    before = by_rank(pair.d, "loads")
    texts = []
    expected = []
    engines = set()
    for p_rank, d_rank in product(range(RANKS), repeat=2):
        prompt = prompt_of(10 * p_rank + d_rank + 1, 150)
        params = complete(pair.p, p_rank, prompt, OPEN, 1)["kv_transfer_params"]
        engines.add((params["remote_engine_id"], params["remote_port"]))
        texts.append(complete(pair.d, d_rank, prompt, params, 16)["choices"][0]["text"])
        expected.append(plain(reference, prompt))

    assert texts == expected
    assert len(engines) == RANKS
    assert by_rank(pair.d, "loads") - before == {0: RANKS, 1: RANKS}


def test_the_router_spreads_its_requests_over_the_ranks(pair, start_router, reference_answer):
    asked = [question for question in questions(30, seed=8, longest=400) if len(question.prompt) > 40][:16]
    url = start_router(
        "router-dp", *([SimpleNamespace(address=f"{spec.address}#dp={RANKS}")] for spec in (pair.p, pair.d))
    )
    rest(pair.p)
    before = by_rank(pair.p, "leases_granted"), by_rank(pair.d, "loads")
    _, wrong = compare(url, asked, reference_answer)
    rest(pair.p)
    granted, loads = by_rank(pair.p, "leases_granted") - before[0], by_rank(pair.d, "loads") - before[1]

    assert wrong == {}
    assert sum(granted.values()) == sum(loads.values()) == len(asked)
    assert min(granted[rank] for rank in range(RANKS)) >= len(asked) / 4
    assert min(loads[rank] for rank in range(RANKS)) >= len(asked) / 4
