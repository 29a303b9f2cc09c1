"""The memory that peers reach: the cache itself, or host buffers that KV goes through."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xpyd_connector.core.messages import MemoryKind, RankInfo, Region
from xpyd_connector.io.nixl import register
from xpyd_connector.shell.cache_regions import Interior, describe_caches, place_of, spans_of
from xpyd_connector.shell.engine_config import Facts
from xpyd_connector.shell.host_staging import CopyRows, StagingBuffer, ThreadCopier, copy_on_host, stream_beside

Tensors = Mapping[str, torch.Tensor]  # by layer


@dataclass(frozen=True, slots=True)
class Half:
    """What one half of the connector, the lending or the borrowing one, moves KV from or into."""

    info: RankInfo
    buffer: StagingBuffer | None  # absent where that is the cache itself


class Memory:
    """Registers memory with NIXL, once. Each half has a buffer of its own: their slots have different masters."""

    def __init__(self, agent: Any, facts: Facts, rank: int, caches: Tensors, interior: Interior) -> None:
        self._facts = facts
        self._rank = rank
        self._interior = interior
        self._copy_rows: CopyRows = copy_on_host
        self.device = next(iter(caches.values())).device
        self._around = stream_beside(self.device)
        lending = self._buffer(caches) if facts.lends else None
        borrowing = self._buffer(caches) if facts.borrows else None
        kind: MemoryKind
        if facts.staging_blocks:
            kind, number = "DRAM", 0
            spans = [span for buffer in (lending, borrowing) if buffer is not None for span in spans_of(buffer.tensors)]
        else:
            kind, number = place_of(caches)
            spans = spans_of(caches)
        self.kind, self.number = kind, number
        self._metadata = register(agent, kind, number, spans)
        self.lending = self._half(caches, lending)
        self.borrowing = self._half(caches, borrowing)

    def use(self, copy_rows: CopyRows) -> None:
        """Copy with vLLM's operation for this device; where the device is the host, it has none."""
        if self.device.type != "cpu":
            self._copy_rows = copy_rows

    def copier(self, buffer: StagingBuffer, wake: Callable[[], None]) -> ThreadCopier:
        """Return what copies between the cache and a buffer of it; whoever asks starts and stops it."""
        return ThreadCopier(buffer, lambda *args: self._copy_rows(*args), self._around, wake)

    @property
    def gigabytes(self) -> float:
        """Size of all that is registered for one half."""
        return sum(r.count * r.heads * r.tokens * r.parts * r.width for r in self.lending.info.regions) / 1e9

    def _buffer(self, caches: Tensors) -> StagingBuffer | None:
        facts = self._facts
        if not facts.staging_blocks:
            return None
        return StagingBuffer(caches, facts.layers, blocks=facts.blocks, slots=facts.staging_blocks)

    def _half(self, caches: Tensors, buffer: StagingBuffer | None) -> Half:
        facts = self._facts
        staged = buffer is not None
        regions = self._describe(caches, facts.blocks) if buffer is None else buffer.regions(self._describe)
        info = RankInfo(self._rank, facts.ranks, self._metadata, self.kind, self.number, regions, staged)
        return Half(info, buffer)

    def _describe(self, tensors: Tensors, blocks: int) -> tuple[Region, ...]:
        return describe_caches(tensors, self._facts, blocks, self._interior)
