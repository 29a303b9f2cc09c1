"""KV staged in host memory: the tensors, and the thread that copies to and from them."""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, TypeAlias

import torch
from vllm.logger import init_logger
from vllm.utils.platform_utils import is_pin_memory_available

from pdrelay_connector.core.ids import BlockId, CopyId
from pdrelay_connector.core.layout.buffer_device import HOST
from pdrelay_connector.core.messages import Region
from pdrelay_connector.core.ports import CopyResult
from pdrelay_connector.errors import UnsupportedCache

logger = init_logger("vllm.pdrelay")

Tensors: TypeAlias = Mapping[str, torch.Tensor]  # by layer
GroupBlocks: TypeAlias = Sequence[Sequence[BlockId]]  # blocks, or slots, for each KV cache group
Direction: TypeAlias = Literal["h2d", "d2h"]
# vLLM's CopyBlocksOp
CopyRows: TypeAlias = Callable[[Tensors, Tensors, list[int], list[int], Direction], None]
Around: TypeAlias = Callable[[Direction], AbstractContextManager[None]]


class _Layers(NamedTuple):
    """Layers of one KV cache group with the same number of rows per block."""

    group: int
    rows: int  # of one block
    cache: dict[str, torch.Tensor]
    host: dict[str, torch.Tensor]


class StagingBuffer:
    """Host memory for ``slots`` blocks of each KV cache group, and for slot 0, which is never
    granted.

    ``groups`` is the group of each layer. Every layer has its own contiguous tensor, with rows of
    the cache's shape. Tensors are pinned if the platform supports it, and zeroed, because peers can
    read all of them.
    """

    def __init__(
        self, caches: Tensors, groups: Mapping[str, int], *, blocks: int, slots: int
    ) -> None:
        self._blocks = blocks
        self.slots = (slots,) * (1 + max(groups.values()))
        self.tensors: dict[str, torch.Tensor] = {}
        self._layers: list[_Layers] = []
        for name, cache in caches.items():
            self._add(name, cache, groups[name])

    def _add(self, name: str, cache: torch.Tensor, group: int) -> None:
        rows, rest = divmod(cache.shape[0], self._blocks)
        if rest or not rows:
            raise UnsupportedCache(
                f"layer {name} has {cache.shape[0]} rows; they must be a multiple of the "
                f"{self._blocks} blocks"
            )
        shape = ((self.slots[group] + 1) * rows, *cache.shape[1:])
        pinned = cache.device.type != HOST and is_pin_memory_available()
        host = torch.zeros(shape, dtype=cache.dtype, device=HOST, pin_memory=pinned)
        self.tensors[name] = host
        layers = next(
            (earlier for earlier in self._layers if (earlier.group, earlier.rows) == (group, rows)),
            None,
        )
        if layers is None:
            self._layers.append(layers := _Layers(group, rows, {}, {}))
        layers.cache[name] = cache
        layers.host[name] = host

    def regions(self, describe: Callable[[Tensors, int], tuple[Region, ...]]) -> tuple[Region, ...]:
        """Return the regions for peers; ``describe`` gets the tensors and their blocks."""
        return describe(self.tensors, max(self.slots) + 1)

    def copy(
        self, copy_rows: CopyRows, blocks: GroupBlocks, slots: GroupBlocks, direction: Direction
    ) -> int:
        """Copy between equally many blocks and slots of each group; return the number of bytes.

        Raises :exc:`IndexError` before the first copy: an invalid block id is an illegal access on
        a GPU, after which its context is lost.
        """
        for group, slots_here in enumerate(self.slots):
            _check("block", blocks[group], self._blocks)
            _check("slot", slots[group], slots_here + 1)
        moved = 0
        for group, rows, cache, host in self._layers:
            theirs = _rows(blocks[group], rows)
            ours = _rows(slots[group], rows)
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
    """A :class:`~pdrelay_connector.core.ports.Copier` on its own thread, one copy at a time.

    ``copy_rows`` is vLLM's operation for the device, or :func:`copy_on_host`. Each copy runs in the
    context ``around``. ``wake`` is called after each copy, to wake the polling thread.
    """

    def __init__(
        self, buffer: StagingBuffer, copy_rows: CopyRows, around: Around, wake: Callable[[], None]
    ) -> None:
        self._buffer = buffer
        self._copy_rows = copy_rows
        self._around = around
        self._wake = wake
        self._numbers = map(CopyId, itertools.count(1))
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pdrelay-staging", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread after the copies in its queue; waits at most ``timeout`` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)

    def out(self, blocks: GroupBlocks, slots: GroupBlocks) -> CopyId:
        """Queue a copy from the device."""
        return self._post(blocks, slots, "d2h")

    def into(self, slots: GroupBlocks, blocks: GroupBlocks) -> CopyId:
        """Queue a copy to the device."""
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
        try:
            with self._around(job.direction):
                moved = self._buffer.copy(self._copy_rows, job.blocks, job.slots, job.direction)
        except Exception as exc:
            # a failed copy must not end the thread, which the other copies need
            logger.exception("pdrelay: copy %d (%s) failed", job.number, job.direction)
            return CopyResult(job.number, f"{type(exc).__name__}: {exc}", 0)
        return CopyResult(job.number, "", moved)


def copy_on_host(
    source: Tensors, target: Tensors, rows: list[int], into: list[int], _: Direction
) -> None:
    """Copy rows of a cache in host memory; vLLM has no operation for it.

    Torch releases the GIL within each call, one layer at a time. Consecutive slots, the usual case,
    need no intermediate tensor.
    """
    source_rows = torch.tensor(rows)
    target_rows = torch.tensor(into)
    source_run = _run(rows)
    target_run = _run(into)
    for name, tensor in source.items():
        if source_run is not None:
            target[name].index_copy_(0, target_rows, tensor[source_run])
        elif target_run is not None and target[name].is_contiguous():
            torch.index_select(tensor, 0, source_rows, out=target[name][target_run])
        else:
            target[name].index_copy_(0, target_rows, tensor.index_select(0, source_rows))


def stream_beside(device: torch.device) -> Around:
    """Return a context that runs a copy on its own stream and synchronizes with it at the end.

    Call this on the thread that launches the model. A copy to the device waits for the kernels
    launched so far: one of them may still write into the blocks for a request that has ended. A
    copy from the device starts at once, because its blocks are complete.
    """
    if device.type == HOST:
        return lambda _: nullcontext()
    module = torch.get_device_module(device)
    computing = module.current_stream(device)
    beside = module.Stream(device)

    @contextlib.contextmanager
    def around(direction: Direction) -> Iterator[None]:
        with module.device(device), module.stream(beside):
            if direction == "h2d":
                beside.wait_stream(computing)
            try:
                yield
            finally:
                beside.synchronize()  # also after an error: started copies still write into slots

    return around


def _check(kind: str, ids: Sequence[BlockId], count: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < count:
        raise IndexError(f"{kind} {max(ids)} is out of range; there are {count}")


def _rows(blocks: Sequence[BlockId], rows: int) -> list[int]:
    """Return the rows of these blocks, in the order of the blocks."""
    return [row for block in blocks for row in range(block * rows, (block + 1) * rows)]


def _run(rows: list[int]) -> slice | None:
    """Return consecutive rows as one slice; None for other rows."""
    first = rows[0]
    return (
        slice(first, first + len(rows)) if rows == list(range(first, first + len(rows))) else None
    )
