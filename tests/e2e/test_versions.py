"""Engines of two versions of vLLM never exchange KV: what a block means may have changed between them."""

import dataclasses
import os
import re

import httpx
import pytest

from pdrelay_tools.local.recipe import Connector, Role, engine
from support.cluster import Watch, engine_spec, start_engine
from support.legs import decode, prefill, prompt_of, text_of
from support.questions import ids
from support.try_versions import KEPT, earlier

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("version", earlier())
def test_a_prefill_engine_of_another_version_is_refused(fleet, model, engines, reference_answer, version):
    """D computes its prompts, even with the policy "fail"; the reason names both versions; no router pairs them."""
    python = KEPT / version / "bin/python"
    if not python.exists():
        pytest.skip(f"there is no environment of vLLM {version}: make test-versions")
    p = engine_spec(f"p-{version}", model, role=Role.PREFILL, connector=Connector.PDRELAY)
    d = engine_spec(f"d-beside-{version}", model, role=Role.DECODE, connector=Connector.PDRELAY, failure_policy="fail")
    command = engine(p, os.environ)
    other = fleet.start(dataclasses.replace(command, argv=[str(python), *command.argv[1:]]))
    ours = start_engine(fleet, d)
    fleet.wait_ready([other, ours], timeout_s=300)
    prompts = [prompt_of(7), prompt_of(8)]
    with Watch(d) as watch:
        texts = [text_of(decode(d, prompt, prefill(p, prompt))) for prompt in prompts]
    log = ours.log.read_text()
    labels = [engine_label(spec) for spec in (p, d)]
    fleet.stop(other, ours)

    assert texts == [reference_answer(ids(prompt)).text for prompt in prompts]
    assert watch.delta("vllm:pdrelay_loads_skipped_incompatible_total") == 2
    assert watch.delta("vllm:external_prefix_cache_hits_total") == 0
    assert re.search(rf"WARNING.*its vllm is '{version}\.\d+', ours is '[\d.]+'; they must be equal", log)
    assert labels[0] != labels[1]


def engine_label(spec):
    """Return the fingerprint that a router compares."""
    page = httpx.get(f"{spec.base_url}/metrics", trust_env=False).text
    return re.search(r'vllm:pdrelay_connector_info\{.*fingerprint="(\w+)"', page)[1]
