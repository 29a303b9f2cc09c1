"""Push, on the scheduler of a prefill engine: the computed blocks of each prompt, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from pdrelay_connector.core.ids import BlockId, RequestId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.push.push_job import ComputedBlocks, TransferOver

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState


@dataclass(slots=True)
class _PrefillProgress:
    """One prefill. A preempted request starts a new ``attempt``, in other blocks."""

    request: Request
    name: RequestId  # of the transfer
    prompt: str | None
    attempt: int = 0
    # blocks of each group that the workers know
    announced: list[int] = field(default_factory=list[int])


class PushProgress:
    """Everything runs on the engine thread. Progress is vLLM's ``num_computed_tokens``."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = groups
        self._zeroed = frozenset(number for number, group in enumerate(groups) if group.is_zeroed)
        self._prefills: dict[str, _PrefillProgress] = {}  # by vLLM's id of the request
        self._names: set[RequestId] = set()  # of their transfers, and of those that are leased
        # for the next step, even if the model computes nothing
        self._pending: list[ComputedBlocks | TransferOver] = []

    def __len__(self) -> int:
        return len(self._prefills) + len(self._pending)

    def __contains__(self, name: RequestId) -> bool:
        return name in self._names

    def begin(self, request: Request, name: RequestId, prompt: str | None) -> None:
        """Add a new request that a decode engine waits for."""
        self._prefills[request.request_id] = _PrefillProgress(request, name, prompt)
        self._names.add(name)

    def name_of(self, request: Request) -> RequestId | None:
        """Return the transfer of a request; None if it has none."""
        progress = self._prefills.get(request.request_id)
        return progress.name if progress is not None else None

    def finish(self, request: Request, blocks: Sequence[Sequence[int]]) -> None:
        """End a prefill: ``blocks`` are all blocks of its prompt, for each KV cache group."""
        progress = self._prefills.pop(request.request_id)
        self._pending.append(
            self._computed_blocks(progress, blocks, request.num_prompt_tokens, last=True)
        )

    def abandon(self, request: Request) -> None:
        """End a prefill without KV."""
        if (progress := self._prefills.pop(request.request_id, None)) is not None:
            self.forget(progress.name)

    def forget(self, name: RequestId) -> None:
        """End a transfer: its blocks are free. A lease of cached blocks is no transfer."""
        if name in self._names:
            self._names.discard(name)
            self._pending.append(TransferOver(name))

    def has_pending(self) -> bool:
        """Whether the next step must reach the workers, even if the model computes nothing."""
        return bool(self._pending)

    def take_computed(self, output: SchedulerOutput) -> list[ComputedBlocks | TransferOver]:
        """Return the blocks that earlier steps have computed and no earlier call has returned.

        vLLM 0.32 adds a step's tokens to ``num_computed_tokens`` after it has called us
        (``_update_after_schedule`` in ``v1/core/sched/scheduler.py``), so the number excludes this
        step. On a GPU earlier steps may still run; the worker waits for them.

        The computed tokens of a request in its first step are hits of the prefix cache: they are
        written while the rest of the prompt is computed. vLLM lets a request hit blocks that this
        very step fills; those are returned with the next step.
        """
        pieces = self._pending
        self._pending = []
        state = output.kv_connector_block_state
        if state is None or not self._prefills:
            return pieces
        cached = output.scheduled_cached_reqs
        entering = {new.req_id for new in output.scheduled_new_reqs} | cached.resumed_req_ids
        prefills = output.num_scheduled_tokens.keys() & self._prefills.keys()
        has_hits = any(
            self._prefills[own].request.num_computed_tokens for own in prefills & entering
        )
        filled: frozenset[int] | None = self._filled(output, state) if has_hits else frozenset()
        for own in prefills:
            progress = self._prefills[own]
            table = state.resolve_block_ids(own)
            computed = min(progress.request.num_computed_tokens, progress.request.num_prompt_tokens)
            if own in entering:
                computed = 0 if filled is None else self._before(filled, table, computed)
            complete = [  # a state is complete at the end of the prompt only
                () if group.state else blocks[: computed // group.block_size]
                for blocks, group in zip(table, self._groups, strict=True)
            ]
            piece = self._computed_blocks(progress, complete, computed, last=False)
            if any(piece.groups):
                pieces.append(piece)
        return pieces

    def _filled(
        self, output: SchedulerOutput, state: "KVConnectorBlockState"
    ) -> frozenset[int] | None:
        """Return the blocks into which this step computes KV; None: it writes into others, too.

        Another connector's loads do, and copies.
        """
        if output.has_sync_kv_loads or output.kv_cache_block_copies:
            return None
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        filled: set[int] = set()
        for own, scheduled in output.num_scheduled_tokens.items():
            first = computed[own]
            stop = first + scheduled
            for blocks, group in zip(state.resolve_block_ids(own), self._groups, strict=True):
                if not group.state:
                    filled.update(blocks[first // group.block_size : -(-stop // group.block_size)])
        return frozenset(filled)

    def _before(self, filled: frozenset[int], table: Sequence[Sequence[int]], computed: int) -> int:
        """Return how many ``computed`` tokens are in blocks before the first that is filled now."""
        for blocks, group in zip(table, self._groups, strict=True):
            if group.state:
                continue
            hits = blocks[: -(-computed // group.block_size)]
            computed = next(
                (place * group.block_size for place, block in enumerate(hits) if block in filled),
                computed,
            )
        return computed

    def _computed_blocks(
        self,
        progress: _PrefillProgress,
        blocks: Sequence[Sequence[int]],
        tokens: int,
        *,
        last: bool,
    ) -> ComputedBlocks:
        if progress.attempt != progress.request.num_preemptions or not progress.announced:
            # preempted: other requests have used its blocks since
            progress.attempt = progress.request.num_preemptions
            progress.announced = [0] * len(self._groups)
        new = [
            [BlockId(b) for b in ids[count:]]
            for ids, count in zip(blocks, progress.announced, strict=True)
        ]
        progress.announced = [
            count + len(ids) for count, ids in zip(progress.announced, new, strict=True)
        ]
        return ComputedBlocks(
            progress.name, progress.prompt, progress.attempt, new, tokens, last, self._zeroed
        )
