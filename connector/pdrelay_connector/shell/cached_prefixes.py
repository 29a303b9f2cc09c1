"""Looks prompts of prefill engines up in a decode engine's prefix cache.

Everything here runs on the engine thread, which owns vLLM's block pool.
"""

from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Final, NamedTuple
from uuid import uuid4

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput

from pdrelay_connector.core.cached_prefix.decode_scheduler import PrefixLookup, Question
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import BlockId, RequestId
from pdrelay_connector.shell.block_shortage import ShortageTimer, ShortRequest
from pdrelay_connector.shell.control_thread import Post
from pdrelay_connector.shell.engine_config import EngineConfig
from pdrelay_connector.shell.prefill_requests import PrefillRequests

LEAST_IMPORTANT: Final = 1 << 62  # as vLLM's priority: these leases are revoked before all others


class _PinnedPrefix(NamedTuple):
    """Blocks that are leased, and the last step that may still compute one of them."""

    question: Question
    lease: RequestId
    blocks: Sequence[BlockId]
    step: int


class CachedPrefixes:
    """Looks prompts up and pins their blocks.

    vLLM enters a block into its prefix cache when it schedules it, before it is computed. So the
    answer leaves when the workers have ended every step that was scheduled before the look-up.
    """

    def __init__(
        self,
        engine_config: EngineConfig,
        prefills: PrefillRequests,
        post: Post,
        *,
        pool: Callable[[], BlockPool],
        counters: Counters,
    ) -> None:
        self.is_on = bool(engine_config.prefix_hash)
        self._block_size = engine_config.groups[0].block_size if engine_config.groups else 0
        self._prefills = prefills
        self._post = post
        self._pool = pool
        self._counters = counters
        self._shortage = ShortageTimer(0.0)
        self._lookups: list[PrefixLookup] = []
        self._pinned: deque[_PinnedPrefix] = deque()
        self._scheduled = 0  # number of the last step that computes tokens
        self._ended = 0  # number of the last one that has ended

    def add(self, lookup: PrefixLookup) -> None:
        """Queue a prompt for the next :meth:`look_up`."""
        self._lookups.append(lookup)

    def scheduled(self, output: SchedulerOutput) -> int:
        """Return the number of a step that vLLM has scheduled; 0 if it computes no tokens."""
        if output.total_num_scheduled_tokens == 0:
            return 0
        self._scheduled += 1
        return self._scheduled

    def relieve(self, short: ShortRequest | None, *, now: float) -> None:
        """Revoke leases of cached blocks that a waiting request lacks.

        What they spare another engine is not worth a request that waits here.
        """
        if self._shortage.is_due(is_short=short is not None, now=now) and short is not None:
            self._prefills.revoke(short.blocks, LEAST_IMPORTANT)

    def leave_out(self, bad: Set[int]) -> None:
        """Answer that nothing is cached where a block was not computed right, after all."""
        for place, pinned in enumerate(self._pinned):
            if not bad.isdisjoint(pinned.blocks):
                self._pinned[place] = pinned._replace(blocks=())

    def ended(self, step: int) -> None:
        """The workers have ended a step."""
        self._ended = max(self._ended, step)
        self._answer()

    def look_up(self) -> None:
        """Pin the cached blocks of the queued prompts.

        Call it after :meth:`scheduled` only, never while vLLM schedules.
        """
        lookups = self._lookups
        self._lookups = []
        for lookup in lookups:
            self._pin(lookup.question, self._find(lookup.hashes))
        self._answer()

    def _find(self, hashes: Sequence[bytes]) -> list[KVCacheBlock]:
        """Return the blocks of the longest cached prefix of a prompt."""
        pool = self._pool()
        cached: list[KVCacheBlock] = []
        if pool.hash_block_size != self._block_size:
            return cached  # hashes of another size: none of these is in the cache
        for block_hash in hashes:
            blocks = pool.get_cached_block(BlockHash(block_hash), [0])
            if blocks is None:
                break
            cached.append(blocks[0])
        return cached

    def _pin(self, question: Question, cached: list[KVCacheBlock]) -> None:
        lease = RequestId(f"cached-{uuid4().hex}")
        if not cached:
            self._counters.count("prefixes_missed")
        elif not self._prefills.hold(lease, cached, LEAST_IMPORTANT):
            self._counters.count("prefixes_refused")
        else:
            self._post(lambda control, now: control.prefix_lender.lend(question, lease, now=now))
            blocks = [BlockId(block.block_id) for block in cached]
            self._pinned.append(_PinnedPrefix(question, lease, blocks, self._scheduled))
            return
        self._send(_PinnedPrefix(question, lease, (), 0))

    def _answer(self) -> None:
        """Answer for the blocks that are computed."""
        while self._pinned and self._pinned[0].step <= self._ended:
            self._send(self._pinned.popleft())

    def _send(self, pinned: _PinnedPrefix) -> None:
        question, lease, blocks, _ = pinned
        self._post(
            lambda control, _: control.prefix_lender.answer(
                question, lease, self._block_size, blocks
            )
        )
