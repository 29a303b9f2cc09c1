"""Where vLLM's own kernel puts tokens, and how many it counts on a rank, against our arithmetic and the tests' rule."""

import itertools
import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell import vllm_versions

    if not vllm_versions.DIVIDES_CONTEXTS:
        pytest.skip("context parallelism is refused in this version", allow_module_level=True)
    import torch
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
    from vllm.v1.worker import block_table as module

from pdrelay_connector.core.layout.shards import Shard
from support.token_slots import slot_of

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SIZE = 8
TOKENS = 100
TABLE = [5, 7, 3, 9, 4, 2, 8, 6, 1, 11, 10, 13, 12]
DIVISIONS = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 8)))


class Pointer:
    """An address in an array, which a kernel of Triton's adds numbers to."""

    def __init__(self, array, offsets=0):
        self.array, self.offsets = array, offsets

    def __add__(self, number):
        return Pointer(self.array, self.offsets + number)


class Value(np.ndarray):
    """Numbers that a kernel has loaded."""

    def to(self, kind):
        return self.astype(kind)


class NumpyTriton:
    """As much of ``triton.language`` as the kernel needs, for one of its programs."""

    constexpr = int
    int64 = np.int64

    def __init__(self, program):
        self._program = program

    def program_id(self, _):
        return self._program

    @staticmethod
    def num_programs(_):
        return 2  # of one request, and of the rest of the buffer

    @staticmethod
    def load(pointer, mask=None, other=0):
        offsets = pointer.offsets if mask is None else np.where(mask, pointer.offsets, 0)
        values = pointer.array[offsets] if mask is None else np.where(mask, pointer.array[offsets], other)
        return np.asarray(values).view(Value)

    @staticmethod
    def store(pointer, values, mask):
        values = np.broadcast_to(values, mask.shape)
        pointer.array[pointer.offsets[mask]] = values[mask]

    arange = staticmethod(np.arange)
    where = staticmethod(np.where)


@pytest.fixture
def slots(monkeypatch):
    """Run vLLM's kernel for one request; returns the slot of each token, -1 for those of other ranks."""

    def run(ranks, rank, interleave):
        found = np.full(TOKENS, -7)
        monkeypatch.setattr(module, "tl", NumpyTriton(0))
        kernel = module.ComputeSlotMappingKernel.kernel
        kernel = getattr(kernel, "fn", kernel)
        table = np.array(TABLE + [0] * (TOKENS - len(TABLE)))
        kernel(
            TOKENS, TOKENS, Pointer(np.array([0, TOKENS])), Pointer(np.arange(TOKENS)), Pointer(table), len(table),
            Pointer(found), SIZE, ranks, rank, interleave, -1, 1024,
        )  # fmt: skip
        return found.tolist()

    return run


@pytest.mark.parametrize(("ranks", "interleave"), DIVISIONS)
def test_tokens_are_where_vllms_kernel_puts_them(slots, ranks, interleave):
    """Each on one rank, and on each rank without gaps."""
    for rank in range(ranks):
        shard = Shard(rank, ranks, interleave)
        for token, slot in enumerate(slots(ranks, rank, interleave)):
            rule = slot_of(token, SIZE, ranks, rank, interleave)
            assert slot == (-1 if rule is None else TABLE[rule[0]] * SIZE + rule[1])
            assert bool(shard.keeps(np.array([token]))[0]) == (rule is not None)
            if rule is not None:
                place = shard.before(token)
                assert place == int(shard.places(np.array([token]))[0])
                assert (place // SIZE, place % SIZE) == rule


@pytest.mark.parametrize(("ranks", "interleave"), DIVISIONS)
def test_a_rank_keeps_as_many_tokens_as_vllm_counts(ranks, interleave):
    """Attention reads so many of its blocks."""
    lengths = torch.arange(TOKENS)
    for rank in range(ranks):
        counted = get_dcp_local_seq_lens(lengths, ranks, rank, interleave).tolist()
        assert [Shard(rank, ranks, interleave).before(token) for token in range(TOKENS)] == counted
