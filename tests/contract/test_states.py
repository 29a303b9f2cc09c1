"""Which block vLLM keeps a state in: the connector reads it there and writes it there."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager
    from vllm.v1.kv_cache_interface import MambaSpec, compute_layer_kv_cache_shape_bytes

    from pdrelay_connector.shell.cache_specs import group_of

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SIZE, CONTEXT = 16, 512


def spec(mode):
    """As vLLM makes it: with prefix caching, blocks of the attention layers' size, else one for the whole context."""
    size = SIZE if mode == "align" else CONTEXT
    return MambaSpec(block_size=size, shapes=((3, 8),), dtypes=(torch.float32,), mamba_cache_mode=mode)


def manager(mode):
    pool = BlockPool(200, enable_caching=mode == "align", hash_block_size=SIZE)
    return MambaManager(
        spec(mode), pool, enable_caching=mode == "align", kv_cache_group_id=0, scheduler_block_size=SIZE,
        max_admission_blocks_per_request=200,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["none", "align"])
def test_a_group_forgets_what_vllm_forgets(mode):
    """All states but the last."""
    group = group_of(spec(mode))

    for computed in range(1, 100):
        assert group.first_needed(computed) == MambaManager.get_num_skipped_tokens(SimpleNamespace(), computed)


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("computed", [1, 15, 16, 17, 31, 32, 33, 160, 511])
def test_a_load_gets_the_block_from_which_the_next_token_is_computed(mode, computed):
    """The worker looks at block 0, or at that of the last computed token (``preprocess_mamba`` in ``mamba_utils``)."""
    blocks = manager(mode)
    blocks.add_local_computed_blocks("d", [], 0, computed)
    blocks.allocate_external_computed_blocks("d", 0, computed)
    table = [block.block_id for block in blocks.req_to_blocks["d"]]
    group = group_of(spec(mode))
    start, stop = group.missing_tokens(computed + 1, computed)
    (ours,) = table[group.blocks_of(start, stop)]

    assert ours == table[(computed - 1) // SIZE if mode == "align" else 0]
    assert [block for block in table if block] == [ours]


@pytest.mark.parametrize("mode", ["none", "align"])
def test_vllm_passes_a_state_as_one_row_of_bytes(mode):
    """Whatever its tensors are."""
    assert compute_layer_kv_cache_shape_bytes(spec(mode), 7) == (7, 1, 1, 3 * 8 * 4)
