"""Host memory that KV goes through: bit-exact both ways, whatever the layout, and never on the caller's thread."""

import random
import threading
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, at its import
    import torch
    from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
    from vllm.v1.kv_cache_layout import KVCacheLayout

from pdrelay_connector.errors import UnsupportedCache
from pdrelay_connector.shell.host_staging import StagingBuffer, ThreadCopier, copy_on_host, stream_beside

BLOCKS = 9
HEADS = 2
TOKENS = 4
CONTENT = 6
SLOTS = 5
LAYERS = ("l.0", "l.1", "l.2")
GROUPS = {"l.0": 0, "l.1": 1, "l.2": 0}
HAS_CUDA = torch.cuda.is_available()


def make_caches(layout, *, rows=1, device="cpu", dtype=torch.bfloat16):
    """All layers in one allocation, laid out as vLLM does; no two elements are alike, as far as the type goes."""
    sizes = (len(LAYERS), BLOCKS * rows, HEADS, TOKENS, CONTENT)
    order = layout.stride_order
    physical = torch.randint(-(2**15), 2**15 - 1, [sizes[i] for i in order], dtype=torch.int16).view(dtype).to(device)
    logical = physical.permute([order.index(i) for i in range(5)])
    assert logical.shape == sizes
    return dict(zip(LAYERS, logical.unbind(0), strict=True))


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.int16).clone()


@pytest.fixture
def copiers():
    """Every thread that a test starts has ended after it."""
    started = []

    def start(buffer, copy_rows=copy_on_host, device="cpu"):
        woken = threading.Semaphore(0)
        copier = ThreadCopier(buffer, copy_rows, stream_beside(torch.device(device)), woken.release)
        copier.start()
        started.append(copier)
        return copier, woken

    yield start
    for copier in started:
        copier.stop()
        assert not copier._thread.is_alive()


def wait(copier, woken, copies):
    ended = []
    while len(ended) < copies:
        assert woken.acquire(timeout=20)
        ended += copier.poll()
    return ended


def rows_of(tensor, blocks, rows):
    return torch.stack([tensor[b * rows + r] for b in blocks for r in range(rows)]) if blocks else tensor[:0]


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_copied_out_and_in_again_is_the_same_to_the_bit(copiers, layout, rows, seed):
    """From any blocks through any slots into any blocks; and nothing else changes, here or there."""
    check_round_trip(copiers, layout, rows, seed, "cpu", copy_on_host)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA")
@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("rows", [1, 2])
def test_vllms_own_operation_copies_to_and_from_a_device(copiers, layout, rows):
    """On a stream beside the one that computes."""
    check_round_trip(copiers, layout, rows, 0, "cuda", copy_kv_blocks)


def check_round_trip(copiers, layout, rows, seed, device, copy_rows):
    dice = random.Random(seed)
    torch.manual_seed(seed)
    caches = make_caches(layout, rows=rows, device=device)
    before = {name: bits(tensor) for name, tensor in caches.items()}
    buffer = StagingBuffer(caches, GROUPS, blocks=BLOCKS, slots=SLOTS)
    copier, woken = copiers(buffer, copy_rows, device)
    counts = [dice.randint(0, 4), dice.randint(1, 4)]
    chosen = [dice.sample(range(1, BLOCKS), 2 * count) for count in counts]
    blocks = [ids[:count] for ids, count in zip(chosen, counts, strict=True)]
    into = [ids[count:] for ids, count in zip(chosen, counts, strict=True)]
    slots = [dice.sample(range(1, SLOTS + 1), count) for count in counts]
    if seed % 2:  # as slots mostly are
        slots = [list(range(1, count + 1)) for count in counts]
    numbers = [copier.out(blocks, slots), copier.into(slots, into)]
    ended = wait(copier, woken, 2)

    row = rows * HEADS * TOKENS * CONTENT * 2
    assert ended == [(number, "", row * (2 * counts[0] + counts[1])) for number in numbers]
    for name, group in GROUPS.items():
        expected = before[name].clone()
        source = rows_of(before[name], blocks[group], rows)
        for place, block in enumerate(into[group]):
            expected[block * rows : (block + 1) * rows] = source[place * rows : (place + 1) * rows]
        assert torch.equal(bits(caches[name]), expected)
        assert torch.equal(rows_of(bits(buffer.tensors[name]), slots[group], rows), source)
        unused = [slot for slot in range(SLOTS + 1) if slot not in slots[group]]
        assert not rows_of(bits(buffer.tensors[name]), unused, rows).any()


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_every_layer_has_contiguous_room_of_its_own(layout):
    """For all slots and slot 0, which is never granted; zeroed, because peers can read it."""
    buffer = StagingBuffer(make_caches(layout, rows=2), GROUPS, blocks=BLOCKS, slots=SLOTS)

    assert set(buffer.tensors) == set(LAYERS)
    for tensor in buffer.tensors.values():
        assert tensor.shape == ((SLOTS + 1) * 2, HEADS, TOKENS, CONTENT)
        assert tensor.is_contiguous()
        assert not tensor.any()
    assert len({tensor.data_ptr() for tensor in buffer.tensors.values()}) == len(LAYERS)
    assert buffer.slots == (SLOTS, SLOTS)
    assert buffer.regions(lambda tensors, blocks: (sorted(tensors), blocks)) == (list(LAYERS), SLOTS + 1)


def test_layers_of_one_group_may_have_rows_of_their_own():
    """Kernels cut vLLM's blocks as they like."""
    caches = {"a": torch.arange(8).reshape(4, 2).to(torch.float32), "b": torch.arange(16).reshape(8, 2).float()}
    buffer = StagingBuffer(caches, {"a": 0, "b": 0}, blocks=4, slots=2)
    moved = buffer.copy(copy_on_host, [[3, 1]], [[1, 2]], "d2h")

    assert buffer.tensors["a"].tolist() == [[0, 0], [6, 7], [2, 3]]
    assert buffer.tensors["b"].tolist() == [[0, 0], [0, 0], [12, 13], [14, 15], [4, 5], [6, 7]]
    assert moved == 2 * 8 + 4 * 8


@pytest.mark.parametrize("rows", [3, 10])
def test_a_cache_that_is_not_made_of_whole_blocks_is_refused(rows):
    """With both numbers."""
    with pytest.raises(UnsupportedCache, match=f"layer a has {rows} rows; they must be a multiple of the 4 blocks"):
        StagingBuffer({"a": torch.zeros(rows, 2)}, {"a": 0}, blocks=4, slots=2)


def test_a_copy_that_fails_says_why_and_the_next_one_is_made(copiers):
    """One request's bad luck is not the engine's end."""
    caches = make_caches(KVCacheLayout.LBHNC)
    buffer = StagingBuffer(caches, GROUPS, blocks=BLOCKS, slots=SLOTS)
    copier, woken = copiers(buffer)
    copier.out([[BLOCKS], []], [[1], []])
    copier.out([[1], []], [[2], []])
    first, second = wait(copier, woken, 2)

    assert "out of range" in first.reason
    assert (first.bytes, second.reason) == (0, "")
    assert torch.equal(bits(buffer.tensors["l.0"][2]), bits(caches["l.0"][1]))


def test_copies_are_made_on_their_own_thread_in_the_order_asked_for(copiers):
    """The caller goes on at once; later copies may need what earlier ones brought."""
    caches = make_caches(KVCacheLayout.LBHNC)
    buffer = StagingBuffer(caches, GROUPS, blocks=BLOCKS, slots=SLOTS)
    may_start = threading.Event()
    threads = []

    def copy_rows(*args):
        assert may_start.wait(20)
        threads.append(threading.current_thread().name)
        copy_on_host(*args)

    copier, woken = copiers(buffer, copy_rows)
    numbers = [copier.out([[1], []], [[1], []]) for _ in range(3)]
    assert copier.poll() == []
    may_start.set()

    assert [each.copy for each in wait(copier, woken, 3)] == numbers
    assert threads == ["pdrelay-staging"] * 3


def test_copies_of_nothing_end_as_well(copiers):
    """A part may lack a group."""
    buffer = StagingBuffer(make_caches(KVCacheLayout.LBHNC), GROUPS, blocks=BLOCKS, slots=SLOTS)
    copier, woken = copiers(buffer)
    copier.into([[], []], [[], []])
    (ended,) = wait(copier, woken, 1)

    assert (ended.reason, ended.bytes) == ("", 0)


def test_a_copier_that_stops_ends_what_it_was_asked_for(copiers):
    """Slots of other loads depend on it."""
    buffer = StagingBuffer(make_caches(KVCacheLayout.LBHNC), GROUPS, blocks=BLOCKS, slots=SLOTS)
    copier, _ = copiers(buffer)
    for _ in range(20):
        copier.out([[1], []], [[1], []])
    copier.stop()

    assert len(copier.poll()) == 20


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA")
def test_host_memory_is_pinned_for_a_device():
    """Else every copy goes through yet another buffer, of the driver's."""
    buffer = StagingBuffer(make_caches(KVCacheLayout.LBHNC, device="cuda"), GROUPS, blocks=BLOCKS, slots=SLOTS)

    assert all(tensor.is_pinned() for tensor in buffer.tensors.values())
