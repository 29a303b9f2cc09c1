"""Host memory that KV goes through: the tensors, and the thread that copies to and from them."""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, TypeAlias

import torch
from vllm.logger import init_logger
from vllm.utils.platform_utils import is_pin_memory_available

from xpyd_connector.core.ids import BlockId, CopyId
from xpyd_connector.core.layout.buffer_device import HOST
from xpyd_connector.core.messages import Region
from xpyd_connector.core.ports import CopyResult
from xpyd_connector.errors import UnsupportedCache

logger = init_logger("vllm.xpyd")

Tensors: TypeAlias = Mapping[str, torch.Tensor]  # by layer
GroupBlocks: TypeAlias = Sequence[Sequence[BlockId]]  # blocks, or slots, of each KV cache group
Direction: TypeAlias = Literal["h2d", "d2h"]
CopyRows: TypeAlias = Callable[[Tensors, Tensors, list[int], list[int], Direction], None]  # vLLM's CopyBlocksOp
Around: TypeAlias = Callable[[Direction], AbstractContextManager[None]]


class _Layers(NamedTuple):
    """Layers of one KV cache group whose kernels cut a block into equally many rows."""

    group: int
    rows: int  # of one block
    cache: dict[str, torch.Tensor]
    host: dict[str, torch.Tensor]


class StagingBuffer:
    """Host memory for ``slots`` blocks of each KV cache group, and for slot 0, which is never granted.

    ``groups`` is the group of each layer. Every layer has a tensor of its own, contiguous, whose rows are shaped like
    the cache's whatever their strides there; pinned, where the platform can. Peers can read all of it, so it is zeroed.
    """

    def __init__(self, caches: Tensors, groups: Mapping[str, int], *, blocks: int, slots: int) -> None:
        self._blocks = blocks
        self.slots = (slots,) * (1 + max(groups.values()))
        self.tensors: dict[str, torch.Tensor] = {}
        self._layers: list[_Layers] = []
        for name, cache in caches.items():
            self._add(name, cache, groups[name], blocks)

    def _add(self, name: str, cache: torch.Tensor, group: int, blocks: int) -> None:
        rows = cache.shape[0] // blocks
        if rows * blocks != cache.shape[0] or not rows:
            raise UnsupportedCache(
                f"layer {name} has {cache.shape[0]} rows; they must be a multiple of the {blocks} blocks"
            )
        shape = ((self.slots[group] + 1) * rows, *cache.shape[1:])
        pinned = cache.device.type != HOST and is_pin_memory_available()
        host = torch.zeros(shape, dtype=cache.dtype, device=HOST, pin_memory=pinned)
        self.tensors[name] = host
        layers = next((each for each in self._layers if (each.group, each.rows) == (group, rows)), None)
        if layers is None:
            self._layers.append(layers := _Layers(group, rows, {}, {}))
        layers.cache[name], layers.host[name] = cache, host

    @property
    def bytes(self) -> int:
        """Size of all of it."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def regions(self, describe: Callable[[Tensors, int], tuple[Region, ...]]) -> tuple[Region, ...]:
        """Return what peers must know of it; ``describe`` gets the tensors and how many blocks each has room for."""
        return describe(self.tensors, max(self.slots) + 1)

    def copy(self, copy_rows: CopyRows, blocks: GroupBlocks, slots: GroupBlocks, direction: Direction) -> int:
        """Copy between blocks and slots, equally many in each group, and return how many bytes that were.

        Raises :exc:`IndexError` before anything is copied: a device that is asked to copy a block it does not have may
        never copy again.
        """
        for group, slots_here in enumerate(self.slots):
            _check("block", blocks[group], self._blocks)
            _check("slot", slots[group], slots_here + 1)
        moved = 0
        for group, rows, cache, host in self._layers:
            theirs, ours = _rows(blocks[group], rows), _rows(slots[group], rows)
            if not theirs:
                continue
            if direction == "d2h":
                copy_rows(cache, host, theirs, ours, direction)
            else:
                copy_rows(host, cache, ours, theirs, direction)
            moved += len(theirs) * sum(tensor[0].nbytes for tensor in host.values())
        return moved


class _Job(NamedTuple):
    number: CopyId
    blocks: GroupBlocks
    slots: GroupBlocks
    direction: Direction


class ThreadCopier:
    """Implements :class:`~xpyd_connector.core.ports.Copier` on a thread of its own, one copy after the other.

    ``copy_rows`` is vLLM's operation for the device, or :func:`copy_on_host`; ``around`` is entered for each copy;
    ``wake`` is called when one has ended, to wake the thread that polls.
    """

    def __init__(self, buffer: StagingBuffer, copy_rows: CopyRows, around: Around, wake: Callable[[], None]) -> None:
        self._buffer = buffer
        self._copy_rows = copy_rows
        self._around = around
        self._wake = wake
        self._numbers = map(CopyId, itertools.count(1))
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="xpyd-staging", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread after the copies asked for so far; waits at most ``timeout`` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)

    def out(self, blocks: GroupBlocks, slots: GroupBlocks) -> CopyId:
        """Start copying from the device."""
        return self._post(blocks, slots, "d2h")

    def into(self, slots: GroupBlocks, blocks: GroupBlocks) -> CopyId:
        """Start copying to the device."""
        return self._post(blocks, slots, "h2d")

    def poll(self) -> list[CopyResult]:
        """Return the copies that ended since the last call."""
        ended: list[CopyResult] = []
        with contextlib.suppress(queue.Empty):
            while True:
                ended.append(self._ended.get_nowait())
        return ended

    def _post(self, blocks: GroupBlocks, slots: GroupBlocks, direction: Direction) -> CopyId:
        number = next(self._numbers)
        self._jobs.put(_Job(number, blocks, slots, direction))
        return number

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._ended.put(self._copied(job))
            self._wake()

    def _copied(self, job: _Job) -> CopyResult:
        start, moved, reason = time.monotonic(), 0, ""
        try:
            with self._around(job.direction):
                moved = self._buffer.copy(self._copy_rows, job.blocks, job.slots, job.direction)
        except Exception as exc:  # whatever a device does to one copy, the others need this thread
            logger.exception("xpyd: copy %d (%s) failed", job.number, job.direction)
            reason = f"{type(exc).__name__}: {exc}"
        return CopyResult(job.number, reason, 0 if reason else moved, time.monotonic() - start)


def copy_on_host(source: Tensors, target: Tensors, rows: list[int], into: list[int], _: Direction) -> None:
    """Copy rows where the cache is in host memory itself; vLLM has no operation for that.

    Torch lets go of the GIL within each call, which is for one layer at a time. Slots that follow each other, as they
    mostly do, save a copy of the copy.
    """
    there, here = torch.tensor(rows), torch.tensor(into)
    source_run, target_run = _run(rows), _run(into)
    for name, tensor in source.items():
        if source_run is not None:
            target[name].index_copy_(0, here, tensor[source_run])
        elif target_run is not None and target[name].is_contiguous():
            torch.index_select(tensor, 0, there, out=target[name][target_run])
        else:
            target[name].index_copy_(0, here, tensor.index_select(0, there))


def stream_beside(device: torch.device) -> Around:
    """Return what copies of a device run in: a stream of their own, empty again at the end.

    Call it on the thread that computes. Copies to the device start behind the steps that it has been given so far: one
    of them may still write for a request that has ended, whose blocks have been given to another. Copies from it start
    at once: what is in the blocks is complete, which is why they are copied.
    """
    if device.type == HOST:
        return lambda _: nullcontext()
    module = torch.get_device_module(device)
    computing, beside = module.current_stream(device), module.Stream(device)

    @contextlib.contextmanager
    def around(direction: Direction) -> Iterator[None]:
        with module.device(device), module.stream(beside):
            if direction == "h2d":
                beside.wait_stream(computing)
            try:
                yield
            finally:
                beside.synchronize()  # also after an error: what is under way still writes into slots

    return around


def _check(what: str, ids: Sequence[BlockId], count: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < count:
        raise IndexError(f"{what} {max(ids)} is out of range; there are {count}")


def _rows(blocks: Sequence[BlockId], rows: int) -> list[int]:
    """Return the rows of these blocks, in their order."""
    return [row for block in blocks for row in range(block * rows, (block + 1) * rows)]


def _run(rows: list[int]) -> slice | None:
    """Return rows that follow each other as one slice; None where they do not."""
    first = rows[0]
    return slice(first, first + len(rows)) if rows == list(range(first, first + len(rows))) else None
