"""Push, on a prefill engine's scheduler: which blocks of which prompt are computed, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from xpyd_connector.core.ids import BlockId, RequestId
from xpyd_connector.core.writer import Gone, Piece


@dataclass(slots=True)
class _Stream:
    """One prefill. ``announced`` blocks are known to the workers, as of this ``attempt``."""

    request: Request
    name: RequestId  # of the transfer
    prompt: str | None
    attempt: int = 0
    announced: int = 0


class Streams:
    """Everything runs on the engine thread. vLLM's own counters say what is computed."""

    def __init__(self, *, block_size: int, is_chunked: bool) -> None:
        self._block_size = block_size
        self._is_chunked = is_chunked
        self._streams: dict[str, _Stream] = {}  # by vLLM's id of the request
        self._news: list[Piece | Gone] = []  # that no step of the model will bring

    def __len__(self) -> int:
        return len(self._streams) + len(self._news)

    def __contains__(self, name: RequestId) -> bool:
        return any(stream.name == name for stream in self._streams.values())

    def begin(self, request: Request, name: RequestId, prompt: str | None) -> None:
        """A prefill for a decode engine has entered the scheduler."""
        self._streams[request.request_id] = _Stream(request, name, prompt)

    def name_of(self, request: Request) -> RequestId | None:
        """Return the name of the transfer that a request is computed for."""
        stream = self._streams.get(request.request_id)
        return stream.name if stream is not None else None

    def finish(self, request: Request, blocks: Sequence[int]) -> None:
        """The prompt is computed, and ``blocks`` are all of its blocks."""
        stream = self._streams.pop(request.request_id)
        self._news.append(self._piece(stream, blocks, last=True))

    def abandon(self, request: Request) -> None:
        """The prefill ended without KV to hand over."""
        if (stream := self._streams.pop(request.request_id, None)) is not None:
            self.forget(stream.name)

    def forget(self, name: RequestId) -> None:
        """The blocks of a transfer are free."""
        self._news.append(Gone(name))

    def has_news(self) -> bool:
        """Whether the workers must be told something that no step of the model will bring them."""
        return bool(self._news)

    def take_news(self, output: SchedulerOutput) -> list[Piece | Gone]:
        """Return what the steps before this one have computed and nobody has been told.

        vLLM counts a step's tokens as computed when the step has been scheduled, after it has asked for this: so here
        ``num_computed_tokens`` is without this step. On a GPU earlier steps may still run; the worker waits for them.
        """
        pieces, self._news = self._news, []
        state = output.kv_connector_block_state
        if not self._is_chunked or state is None:
            return pieces
        for own in output.num_scheduled_tokens.keys() & self._streams.keys():
            stream = self._streams[own]
            complete = min(stream.request.num_computed_tokens, stream.request.num_prompt_tokens) // self._block_size
            piece = self._piece(stream, state.resolve_block_ids(own)[0][:complete], last=False)
            if piece.blocks:
                pieces.append(piece)
        return pieces

    def _piece(self, stream: _Stream, blocks: Sequence[int], *, last: bool) -> Piece:
        if stream.attempt != stream.request.num_preemptions:
            stream.attempt, stream.announced = stream.request.num_preemptions, 0  # its blocks were another's meanwhile
        new = [BlockId(block) for block in blocks[stream.announced :]]
        stream.announced += len(new)
        return Piece(stream.name, stream.prompt, stream.attempt, new, last)
