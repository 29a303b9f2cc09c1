"""A prefill engine whose cache is full of blocks that nobody reads takes them back, and no text is wrong for it."""

import time

import pytest

from pdrelay_tools.local.recipe import Connector, Role
from support.cluster import engine_spec, metrics, start_engine, wait_until
from support.legs import decode, plain, prefill, prompt_of, text_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LEASE, PATIENCE = 120.0, 1.0  # s; without revoking the next prefill would wait for the first
REVOKED, LOADS = "vllm:pdrelay_leases_revoked_total", "vllm:pdrelay_loads_total"


@pytest.fixture(scope="module")
def crowded(fleet, model):
    """A prefill engine with room for 80 blocks of 32 tokens."""
    config = {"kv_lease_duration": LEASE, "revoke_after": PATIENCE}
    spec = engine_spec(
        "p-crowded",
        model,
        role=Role.PREFILL,
        connector=Connector.PDRELAY,
        kv_cache_mib=10,  # float32: 4 KiB a token
        extra_connector_config=config,
        extra_args=("--no-enable-prefix-caching",),
    )
    child = start_engine(fleet, spec)
    fleet.wait_ready([child], timeout_s=300)
    yield spec
    fleet.stop(child)


def test_a_prefill_that_lacks_blocks_gets_those_that_nobody_reads(crowded, engines, reference):
    """The oldest lease goes after a second; its decode engine computes the prompt itself, the others load theirs."""
    d = engines.d0
    prompts = [prompt_of(number, 700) for number in range(300, 304)]
    offers = [prefill(crowded, prompt) for prompt in prompts[:3]]
    before = metrics(crowded)
    loads = metrics(d)[LOADS]
    assert before.get(REVOKED, 0.0) == 0.0
    start = time.monotonic()
    offers.append(prefill(crowded, prompts[3]))
    took = time.monotonic() - start
    texts = [text_of(decode(d, prompt, offer)) for prompt, offer in zip(prompts, offers, strict=True)]

    assert PATIENCE < took < LEASE / 4
    assert metrics(crowded)[REVOKED] == 1
    assert texts == [plain(reference, prompt) for prompt in prompts]
    wait_until(lambda: metrics(d)[LOADS] == loads + 3, seconds=30, what="D loads what was not revoked")
    wait_until(lambda: metrics(crowded)["vllm:pdrelay_leases_held"] == 0, seconds=30, what="P holds nothing")
