"""Reads blocks of the KV cache itself, on its device, for checksums."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from zlib import crc32

import msgspec
import torch
from msgspec.structs import replace
from vllm.logger import init_logger

from pdrelay_connector.core.ids import BlockId
from pdrelay_connector.core.layout.buffer_device import HOST
from pdrelay_connector.core.layout.shards import Shard
from pdrelay_connector.core.layout.transfer_plan import row_runs, shard_of
from pdrelay_connector.core.messages import Region
from pdrelay_connector.errors import UnsupportedCache
from pdrelay_connector.shell.engine_config import EngineConfig, WorkerRank
from pdrelay_connector.shell.host_staging import Tensors

logger = init_logger("vllm.pdrelay")


def shape_key(engine_config: EngineConfig, rank: WorkerRank) -> tuple[int, ...]:
    """Return which worker of what engine this is: equal bytes are expected of the same one only."""
    return (rank.tensor, rank.stage, engine_config.ranks, engine_config.stages)


@dataclass(frozen=True, slots=True)
class _ReadableRegion:
    """One region: the bytes of its storage, and where its rows are in there."""

    region: Region
    shard: Shard  # which tokens of a block this rank has
    bytes: torch.Tensor  # one dimension, the whole storage
    first: int  # byte of row 0
    runs: Sequence[tuple[int, int]]  # of a row: offset, bytes

    def pieces(self, block: int, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yield the bytes of the rows of a block that the tokens from ``start`` to ``stop`` of it
        are in: none if other ranks have all of these.
        """
        region = self.region
        first = block * self.region.rows
        tokens = region.tokens * region.covers  # of a row
        begin = self.shard.before(start)
        end = self.shard.before(stop)
        rows = range(first + begin // tokens, first - (-end // tokens)) if begin < end else range(0)
        for row in rows:
            at = self.first + row * region.row_stride
            for offset, length in self.runs:
                yield self.bytes[at + offset : at + offset + length]


class TensorReader:
    """Implements :class:`~pdrelay_connector.core.ports.CacheReader` for torch's tensors."""

    def __init__(self, caches: Tensors, regions: Sequence[Region], key: tuple[int, ...]) -> None:
        """``regions`` describe the tensors, in the order of all engines of this shape.

        ``key`` begins with the number of the rank.
        """
        by_storage = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in caches.values()
        }
        flat = {
            address: torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for address, storage in by_storage.items()
        }
        storages = sorted(flat, reverse=True)
        self._groups: dict[int, list[_ReadableRegion]] = {}
        for region in regions:
            address = next(start for start in storages if start <= region.base)
            readable = _ReadableRegion(
                region,
                shard_of(key[0], region),
                flat[address],
                region.base - address,
                row_runs(region),
            )
            self._groups.setdefault(region.group, []).append(readable)
        self._shape = _digest(regions, key)
        self._has_failed = False

    @property
    def shape(self) -> str:
        """A digest of all that decides a block's bytes, without addresses and numbers of blocks."""
        return self._shape

    def block_size(self, group: int) -> int:
        """Return the tokens of a block of a KV cache group; 0 if this rank has no layer of it."""
        regions = self._groups.get(group)
        return regions[0].region.block_size if regions else 0

    def checksum(self, group: int, block: BlockId, start: int, stop: int) -> int | None:
        """Return the CRC-32 of the block's rows of these tokens in all layers; None: torch failed.

        Of memory on a device, they are copied to the host in one piece, on the stream of the
        calling thread: it may be out of memory, which must not end the engine. The first failure is
        logged.
        """
        try:
            return self._checksum(group, block, start, stop)
        except (RuntimeError, MemoryError) as exc:
            if not self._has_failed:
                logger.warning(
                    "pdrelay: a block's checksum cannot be taken, and it is not compared: %s", exc
                )
            self._has_failed = True
            return None

    def _checksum(self, group: int, block: BlockId, start: int, stop: int) -> int:
        pieces = [
            piece for region in self._groups[group] for piece in region.pieces(block, start, stop)
        ]
        if pieces and pieces[0].device.type != HOST:
            return crc32(memoryview(torch.cat(pieces).cpu().numpy()))
        crc = 0
        for piece in pieces:
            crc = crc32(memoryview(piece.numpy()), crc)
        return crc


def reader_of(
    caches: Tensors, describe: Callable[[], Sequence[Region]], key: tuple[int, ...]
) -> TensorReader | None:
    """Return the reader of a cache; None, with a log line, if checksums cannot be taken."""
    try:
        return TensorReader(caches, describe(), key)
    except (UnsupportedCache, RuntimeError) as exc:
        logger.warning(
            "pdrelay: no load is compared, for checksums of this cache cannot be taken: %s", exc
        )
        return None


def _digest(regions: Sequence[Region], key: tuple[int, ...]) -> str:
    alike = [replace(region, base=0, count=1, row_stride=0) for region in regions]
    return blake2b(msgspec.msgpack.encode((alike, key)), digest_size=16).hexdigest()
