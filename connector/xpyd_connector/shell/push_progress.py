"""Push, on a prefill engine's scheduler: which blocks of which prompt are computed, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from xpyd_connector.core.ids import BlockId, RequestId
from xpyd_connector.core.layout.cache_groups import CacheGroup
from xpyd_connector.core.push.push_job import ComputedBlocks, TransferOver


@dataclass(slots=True)
class _PrefillProgress:
    """One prefill. So many blocks are ``announced`` to the workers, as of this ``attempt``."""

    request: Request
    name: RequestId  # of the transfer
    prompt: str | None
    attempt: int = 0
    announced: list[int] = field(default_factory=list[int])  # of each KV cache group


class PushProgress:
    """Everything runs on the engine thread. vLLM's own counters say what is computed."""

    def __init__(self, groups: Sequence[CacheGroup], *, is_chunked: bool) -> None:
        self._groups = groups
        self._is_chunked = is_chunked
        self._push_progress: dict[str, _PrefillProgress] = {}  # by vLLM's id of the request
        self._names: set[RequestId] = set()  # of their transfers
        self._news: list[ComputedBlocks | TransferOver] = []  # that no step of the model will bring

    def __len__(self) -> int:
        return len(self._push_progress) + len(self._news)

    def __contains__(self, name: RequestId) -> bool:
        return name in self._names

    def begin(self, request: Request, name: RequestId, prompt: str | None) -> None:
        """A prefill for a decode engine has entered the scheduler."""
        self._push_progress[request.request_id] = _PrefillProgress(request, name, prompt)
        self._names.add(name)

    def name_of(self, request: Request) -> RequestId | None:
        """Return the name of the transfer that a request is computed for."""
        stream = self._push_progress.get(request.request_id)
        return stream.name if stream is not None else None

    def finish(self, request: Request, blocks: Sequence[Sequence[int]]) -> None:
        """The prompt is computed, and ``blocks`` are all of its blocks, of each KV cache group."""
        stream = self._push_progress.pop(request.request_id)
        self._names.discard(stream.name)
        self._news.append(self._piece(stream, blocks, request.num_prompt_tokens, last=True))

    def abandon(self, request: Request) -> None:
        """The prefill ended without KV to hand over."""
        if (stream := self._push_progress.pop(request.request_id, None)) is not None:
            self._names.discard(stream.name)
            self.forget(stream.name)

    def forget(self, name: RequestId) -> None:
        """The blocks of a transfer are free."""
        self._news.append(TransferOver(name))

    def has_pending(self) -> bool:
        """Whether the workers must be told something that no step of the model will bring them."""
        return bool(self._news)

    def take_computed(self, output: SchedulerOutput) -> list[ComputedBlocks | TransferOver]:
        """Return what earlier steps have computed and no call has returned before.

        vLLM counts a step's tokens as computed when the step has been scheduled, after it has asked for this: so here
        ``num_computed_tokens`` is without this step. On a GPU earlier steps may still run; the worker waits for them.

        What a request brings along into its first step are hits of the prefix cache, and vLLM lets it hit blocks that
        another request is only about to compute, in this very step. They are returned with the next one.
        """
        pieces, self._news = self._news, []
        state = output.kv_connector_block_state
        if not self._is_chunked or state is None:
            return pieces
        entering = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        for own in (output.num_scheduled_tokens.keys() & self._push_progress.keys()) - entering:
            stream = self._push_progress[own]
            computed = min(stream.request.num_computed_tokens, stream.request.num_prompt_tokens)
            table = state.resolve_block_ids(own)
            complete = [
                blocks[: computed // group.block_size] for blocks, group in zip(table, self._groups, strict=True)
            ]
            piece = self._piece(stream, complete, computed, last=False)
            if any(piece.groups):
                pieces.append(piece)
        return pieces

    def _piece(
        self, stream: _PrefillProgress, blocks: Sequence[Sequence[int]], tokens: int, *, last: bool
    ) -> ComputedBlocks:
        if stream.attempt != stream.request.num_preemptions or not stream.announced:
            stream.attempt = stream.request.num_preemptions  # its blocks were another's meanwhile
            stream.announced = [0] * len(self._groups)
        new = [[BlockId(b) for b in each[known:]] for each, known in zip(blocks, stream.announced, strict=True)]
        stream.announced = [known + len(each) for known, each in zip(stream.announced, new, strict=True)]
        return ComputedBlocks(stream.name, stream.prompt, stream.attempt, new, tokens, last)
