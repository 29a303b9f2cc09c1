"""The memory that peers reach: the KV cache itself, or staging buffers in host memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pdrelay_connector.core.messages import MemoryKind, RankInfo, Region
from pdrelay_connector.io.nixl import NixlTransferAgent, register, unregister
from pdrelay_connector.io.recovering_agent import OpenBackend
from pdrelay_connector.shell.cache_reader import reader_of, shape_key
from pdrelay_connector.shell.cache_regions import KernelLayout, describe_caches, place_of, spans_of
from pdrelay_connector.shell.engine_config import EngineConfig, WorkerRank
from pdrelay_connector.shell.host_staging import (
    CopyRows,
    StagingBuffer,
    Tensors,
    ThreadCopier,
    copy_on_host,
    stream_beside,
)


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """The memory of one role, producer or consumer."""

    info: RankInfo
    buffer: StagingBuffer | None  # absent if it is the KV cache itself


class RegisteredMemory:
    """Registers memory with NIXL: once for its peers, and once for each backend that replaces a
    broken one.

    Each role has its own buffer, because other threads grant its slots. ``make_agent`` returns a
    NIXL agent for this kind of memory, and the device that has the cache.
    """

    def __init__(
        self,
        make_agent: Callable[[MemoryKind, torch.device], Any],
        engine_config: EngineConfig,
        rank: WorkerRank,
        caches: Tensors,
        kernel_layout: KernelLayout,
    ) -> None:
        self._engine_config = engine_config
        self._rank = rank
        self._kernel_layout = kernel_layout
        self._copy_rows: CopyRows = copy_on_host
        self.device = next(iter(caches.values())).device
        self._around = stream_beside(self.device)
        producer = self._buffer(caches) if engine_config.is_producer else None
        consumer = self._buffer(caches) if engine_config.is_consumer else None
        kind: MemoryKind
        if engine_config.staging_blocks:
            kind = "DRAM"
            number = 0
            spans = [
                span
                for buffer in (producer, consumer)
                if buffer is not None
                for span in spans_of(buffer.tensors)
            ]
        else:
            kind, number = place_of(caches)
            spans = spans_of(caches)
        self.kind: MemoryKind = kind
        self.number = number
        self._make_agent = make_agent
        # NIXL serves peers as long as this agent lives, even if no thread here uses it. Each
        # generation has another one: what UCX has opened for a peer, it closes with the agent
        # alone.
        self.agent = make_agent(kind, self.device)
        self._replacements: list[Any] = []  # agents
        self._spans = spans
        self.cache = reader_of(
            caches,
            lambda: self._describe(caches, engine_config.blocks),
            shape_key(engine_config, rank),
        )
        self._metadata = register(self.agent, kind, number, spans)
        self.producer = self._role_memory(caches, producer)
        self.consumer = self._role_memory(caches, consumer)

    def use(self, copy_rows: CopyRows) -> None:
        """Copy with vLLM's operation for this device. vLLM has none for the CPU."""
        if self.device.type != "cpu":
            self._copy_rows = copy_rows

    def unregister(self) -> None:
        """Let go of the memory: NIXL and its peers reach it no more."""
        for agent in (self.agent, *self._replacements):
            unregister(agent, self.kind, self.number, self._spans)
        self._replacements = []

    def replacement(self) -> OpenBackend:
        """Return another backend, with which this rank reads and writes; raises ``TransferError``.

        Peers go on to reach this memory through the first one.
        """
        agent = self._make_agent(self.kind, self.device)
        register(agent, self.kind, self.number, self._spans)
        self._replacements.append(agent)

        def close() -> None:
            self._replacements.remove(agent)  # it lets go of the memory with its end

        return OpenBackend(NixlTransferAgent(agent, self.kind, self.number), close)

    def copier(self, buffer: StagingBuffer, wake: Callable[[], None]) -> ThreadCopier:
        """Return a copier between the cache and a buffer; the caller starts and stops it."""
        return ThreadCopier(buffer, lambda *args: self._copy_rows(*args), self._around, wake)

    @property
    def gigabytes(self) -> float:
        """Size of the memory that peers reach."""
        return sum(size for _, size in self._spans) / 1e9

    def _buffer(self, caches: Tensors) -> StagingBuffer | None:
        engine_config = self._engine_config
        if not engine_config.staging_blocks:
            return None
        return StagingBuffer(
            caches,
            engine_config.layers,
            blocks=engine_config.blocks,
            slots=engine_config.staging_blocks,
        )

    def _role_memory(self, caches: Tensors, buffer: StagingBuffer | None) -> RoleMemory:
        engine_config = self._engine_config
        staged = buffer is not None
        regions = (
            self._describe(caches, engine_config.blocks)
            if buffer is None
            else buffer.regions(self._describe)
        )
        info = RankInfo(
            self._rank.tensor,
            engine_config.ranks,
            self._metadata,
            self.kind,
            self.number,
            regions,
            staged,
            stage=self._rank.stage,
            stages=engine_config.stages,
        )
        return RoleMemory(info, buffer)

    def _describe(self, tensors: Tensors, blocks: int) -> tuple[Region, ...]:
        return describe_caches(tensors, self._engine_config, blocks, self._kernel_layout)
