"""Where vLLM's attention kernel for CPUs keeps which number of a token, and where the connector takes it to be."""

import ctypes
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import cpu_attn

    from pdrelay_connector.shell import kernel_layout as interiors
    from pdrelay_connector.shell import vllm_versions
    from pdrelay_connector.shell.cache_regions import KernelLayout, describe_caches
    from pdrelay_connector.shell.engine_config import EngineConfig

from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.layout.cache_groups import CacheGroup

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
ROWS, HEADS = 3, 2
ROW = 1  # the one that is written; those beside it stay empty
INTEGERS = {2: torch.int16, 4: torch.int32}  # by bytes


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Load the compiled ones, as a worker does."""
    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not for CPUs")
    current_platform.import_kernels()


def told_apart(dtype, *shape):
    """Return numbers of which no two are alike, none is zero, and all are finite."""
    count = torch.Size(shape).numel()
    integers = INTEGERS[dtype.itemsize]
    patterns = torch.arange(1, 1 << 16, dtype=torch.int32).to(integers).view(dtype)
    if dtype.itemsize == 4:
        patterns = torch.arange(1, 1 << 16, dtype=dtype)
    found = patterns[patterns.isfinite()][:count]
    assert found.view(integers).unique().numel() == count
    return found.reshape(shape)


def write(cache, keys, values, tokens, isa):
    """Have the kernel keep these tokens of the row; the views are those of its ``do_kv_cache_update``."""
    rows, heads, block_size, _ = cache.shape
    k, v = cache.view(rows, heads, block_size * 2, -1).chunk(2, dim=2)
    slots = ROW * block_size + tokens
    _custom_ops.cpu_attn_reshape_and_cache(keys[tokens], values[tokens], k, v, slots, isa)


def entries(region, row):
    """Read what a region has of each head and token of a row, through addresses alone, as NIXL does."""
    return [
        [
            b"".join(
                ctypes.string_at(
                    region.base
                    + row * region.row_stride
                    + head * region.head_stride
                    + token * region.token_stride
                    + part * region.part_stride,
                    region.width,
                )
                for part in range(region.parts)
            )
            for token in range(region.tokens)
        ]
        for head in range(region.heads)
    ]


def config(dtype, block_size, head_size, cache_dtype="auto"):
    """Return as much of vLLM's configuration as the connector looks at for this."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block_size, cache_dtype=cache_dtype),
        model_config=SimpleNamespace(dtype=dtype, get_head_size=lambda: head_size),
    )


@pytest.mark.parametrize("block_size", [32, 64, 96])
@pytest.mark.parametrize("head_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_k_and_v_is_where_the_regions_say(dtype, head_size, block_size):
    """One place off, and a decode engine with other blocks would compute with the numbers of another dimension."""
    isa = cpu_attn._get_attn_isa(dtype, block_size, head_size)
    interior = interiors._of_cpu(config(dtype, block_size, head_size), [CacheGroup(block_size)])
    if isa != "vec":
        assert interior is KernelLayout.OPAQUE
        return
    keys, values = told_apart(dtype, 2, block_size, HEADS, head_size)
    cache = torch.zeros(ROWS, HEADS, block_size, 2 * head_size, dtype=dtype)
    first = torch.arange(0, block_size, 3)  # in two steps, neither of which has all tokens of a vector of the kernel
    others = torch.tensor([token for token in reversed(range(block_size)) if token % 3])
    write(cache, keys, values, first, isa)
    write(cache, keys, values, others, isa)
    engine_config = EngineConfig(
        EngineId("e"), Address("127.0.0.1", 1), (CacheGroup(block_size),), {"l": 0}, ROWS, HEADS, 1,
        is_producer=True, is_consumer=True,
    )  # fmt: skip
    regions = describe_caches({"l": cache}, engine_config, ROWS, interior)

    assert interior is KernelLayout.TRANSPOSED
    assert [region.opaque for region in regions] == [False, False]
    for region, written in zip(regions, (keys, values), strict=True):
        bits = written.view(INTEGERS[dtype.itemsize]).transpose(0, 1).numpy()
        assert entries(region, ROW) == [[token.tobytes() for token in head] for head in bits]
        for row in (ROW - 1, ROW + 1):
            assert not any(any(entry) for head in entries(region, row) for entry in head)


def test_the_kernel_has_the_layout_that_it_was_looked_at_in():
    """Another one would come with an order of its own within a head's part of a row."""
    assert [layout.name for layout in cpu_attn.CPUAttentionBackend.supported_kv_cache_layouts()] == ["LBHNC"]
    assert cpu_attn.CPUAttentionBackend.get_name() == "CPU_ATTN"


def test_keys_of_three_dimensions_are_rotated_by_their_step():
    """Their heads are taken for tokens, so a key depends on how many tokens it is computed with.

    LFM2 passes such keys: its engines in tests/models rotate without this kernel. When this fails, they need not.
    """
    if not vllm_versions.ASKS_WHAT_IS_LOADED:
        pytest.skip("models with a state are refused in this version")
    keys = torch.randn(6, 2, 32)
    positions = torch.arange(10, 16)
    cache = torch.randn(64, 32)

    def rotated(at, flat):
        found = keys[at].clone()
        found = found.flatten(1) if flat else found
        _custom_ops.rotary_embedding(positions[at], found.clone(), found, 32, cache, True)
        return found.reshape(-1)

    def depends_on_the_step(flat):
        alone = torch.cat([rotated(slice(each, each + 1), flat) for each in range(6)])
        return not torch.equal(alone, rotated(slice(None), flat))

    assert [depends_on_the_step(flat) for flat in (True, False)] == [False, True]
