"""Push, on the scheduler of a prefill engine: the computed blocks of each prompt, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from pdrelay_connector.core.ids import BlockId, RequestId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.push.push_job import ComputedBlocks, TransferOver


@dataclass(slots=True)
class _PrefillProgress:
    """One prefill. A preempted request starts a new ``attempt``, in other blocks."""

    request: Request
    name: RequestId  # of the transfer
    prompt: str | None
    attempt: int = 0
    announced: list[int] = field(default_factory=list[int])  # blocks of each group that the workers know


class PushProgress:
    """Everything runs on the engine thread. Progress is vLLM's ``num_computed_tokens``."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = groups
        self._prefills: dict[str, _PrefillProgress] = {}  # by vLLM's id of the request
        self._names: set[RequestId] = set()  # of their transfers, and of those that are leased
        self._pending: list[ComputedBlocks | TransferOver] = []  # for the next step, even if the model computes nothing

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
        self._pending.append(self._computed_blocks(progress, blocks, request.num_prompt_tokens, last=True))

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
        """Whether the next step's metadata must reach the workers, even if the model computes nothing."""
        return bool(self._pending)

    def take_computed(self, output: SchedulerOutput) -> list[ComputedBlocks | TransferOver]:
        """Return the blocks that earlier steps have computed and no earlier call has returned.

        vLLM 0.32 adds a step's tokens to ``num_computed_tokens`` after it has called us (``_update_after_schedule`` in
        ``v1/core/sched/scheduler.py``), so the number excludes this step. On a GPU earlier steps may still run; the
        worker waits for them.

        The computed tokens of a request in its first step are hits of the prefix cache. vLLM lets it hit blocks that
        another request computes in the same step, so they are returned with the next step.
        """
        pieces, self._pending = self._pending, []
        state = output.kv_connector_block_state
        if state is None:
            return pieces
        entering = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        for own in (output.num_scheduled_tokens.keys() & self._prefills.keys()) - entering:
            progress = self._prefills[own]
            computed = min(progress.request.num_computed_tokens, progress.request.num_prompt_tokens)
            table = state.resolve_block_ids(own)
            complete = [  # a state is complete at the end of the prompt only
                () if group.state else blocks[: computed // group.block_size]
                for blocks, group in zip(table, self._groups, strict=True)
            ]
            piece = self._computed_blocks(progress, complete, computed, last=False)
            if any(piece.groups):
                pieces.append(piece)
        return pieces

    def _computed_blocks(
        self, progress: _PrefillProgress, blocks: Sequence[Sequence[int]], tokens: int, *, last: bool
    ) -> ComputedBlocks:
        if progress.attempt != progress.request.num_preemptions or not progress.announced:
            progress.attempt = progress.request.num_preemptions  # preempted: other requests have used its blocks since
            progress.announced = [0] * len(self._groups)
        new = [[BlockId(b) for b in each[known:]] for each, known in zip(blocks, progress.announced, strict=True)]
        progress.announced = [known + len(each) for known, each in zip(progress.announced, new, strict=True)]
        return ComputedBlocks(progress.name, progress.prompt, progress.attempt, new, tokens, last)
