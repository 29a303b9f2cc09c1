"""Which blocks vLLM keeps states in where it caches prefixes: what it hits is beside what the connector moves."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell import vllm_versions

    if not vllm_versions.ASKS_WHAT_IS_LOADED:
        pytest.skip("models with a state are refused in this version", allow_module_level=True)
    import torch
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.request import Request

    from pdrelay_connector.shell.cache_specs import group_of

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SIZE, CONTEXT = 16, 512


def spec(**options):
    """As vLLM makes it: blocks of the attention layers' size."""
    return MambaSpec(block_size=SIZE, shapes=((3, 8),), dtypes=(torch.float32,), mamba_cache_mode="align", **options)


GROUP = group_of(spec())


def manager(**options):
    return MambaManager(
        spec(**options), BlockPool(200, enable_caching=True, hash_block_size=SIZE), enable_caching=True,
        kv_cache_group_id=0, scheduler_block_size=SIZE, max_admission_blocks_per_request=200,
    )  # fmt: skip


def allocate(blocks, request, computed, end):
    """Have the manager make room for the tokens of a step."""
    blocks.get_num_blocks_to_allocate(request, end, [], computed, computed, end, prefill_end=end)
    blocks.allocate_new_blocks(request, end, end)


@pytest.mark.parametrize("hit", [1, 2, 10])
@pytest.mark.parametrize("beyond", [1, 15, 16, 17, 100])
def test_after_a_hit_a_load_gets_a_block_of_its_own(hit, beyond):
    """Not the one that was hit, which other requests share; and the next token is computed from what was loaded."""
    blocks = manager()
    computed = hit * SIZE + beyond
    (shared,) = blocks.block_pool.get_new_blocks(1)
    found = [blocks._null_block] * (hit - 1) + [shared]
    blocks.add_local_computed_blocks("d", found, hit * SIZE, beyond)
    blocks.allocate_external_computed_blocks("d", hit * SIZE, beyond)
    table = blocks.req_to_blocks["d"]
    start, stop = GROUP.missing_tokens(computed + 1, beyond)
    (ours,) = table[GROUP.blocks_of(start, stop)]

    assert not ours.is_null
    assert ours is not shared
    allocate(blocks, "d", computed, computed + 1)
    assert table[(computed - 1) // SIZE] is ours


@pytest.mark.parametrize("checkpoints", [0, 1])
@pytest.mark.parametrize("hit", [0, 2])
@pytest.mark.parametrize("step", [SIZE, 3 * SIZE])
@pytest.mark.parametrize("tokens", [33, 47, 48, 49, 160, 170])
def test_a_prompts_last_state_is_in_the_block_that_is_lent(tokens, step, hit, checkpoints):
    """Whatever the steps, a hit at the beginning, and blocks that keep a state within a step (Mamba 2)."""
    options = {"num_prefill_checkpoint_blocks": checkpoints, "prefill_checkpoint_alignment": checkpoints or None}
    blocks = manager(**options)
    computed = hit * SIZE
    if hit:
        found = [blocks._null_block] * (hit - 1) + blocks.block_pool.get_new_blocks(1)
        blocks.add_local_computed_blocks("p", found, computed, 0)
    while computed < tokens:
        end = min(computed + step, tokens)
        blocks.remove_skipped_blocks("p", computed)
        allocate(blocks, "p", computed, end)
        computed = end
    table = blocks.req_to_blocks["p"]
    (lent,) = table[GROUP.blocks_of(tokens - 1, tokens)]

    assert lent is table[-1]  # where the worker keeps the running state (preprocess_mamba)
    assert not lent.is_null


def test_d_hits_kv_that_it_has_loaded_and_gets_a_block_for_the_state():
    """Its cache has no state where two prompts part; vLLM lets it hit their KV, as a load brings the state."""
    attention = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    layers = [KVCacheGroupSpec(["a"], attention), KVCacheGroupSpec(["s"], spec())]
    cache = KVCacheManager(KVCacheConfig(100, [], layers), CONTEXT, SIZE, SIZE)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(SIZE, sha256)

    def loaded(prompt):
        """Return how many tokens D hits, whether a state lacks there, and the table of the states once all is there."""
        request = Request("d", prompt, SamplingParams(), None, block_hasher=hasher)
        blocks, hit, _, lacks_state = cache.get_computed_blocks_for_connector(request)
        external = len(prompt) - 1 - hit
        cache.allocate_slots(
            request, 0, hit, blocks, num_external_computed_tokens=external, delay_cache_blocks=True,
            skip_zeroing_group_ids=(0, 1),
        )  # fmt: skip
        cache.cache_blocks(request, len(prompt) - 1)
        table = cache.get_block_ids("d")[1]
        ours = table[GROUP.blocks_of(*GROUP.missing_tokens(len(prompt), external))]
        cache.free(request)
        return hit, lacks_state, table, ours

    assert loaded(list(range(100)))[:2] == (0, False)
    hit, lacks_state, table, (ours,) = loaded([*range(80), *range(200, 230)])
    assert (hit, lacks_state) == (80, True)
    assert [block for block in table if block] == [ours]
    assert table.index(ours) == (110 - 2) // SIZE
