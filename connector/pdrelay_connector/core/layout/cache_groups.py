"""Which tokens of a prompt a KV cache group keeps, and which a decode engine lacks: arithmetic.

vLLM puts layers that need the same tokens into one group with its own block tables
(``vllm/v1/kv_cache_interface.py``): full attention, a sliding window, a chunk, or a state. A state
is in the block of the last token that it covers; a ring of the last tokens is in the request's only
block.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One group. All numbers are tokens; 0 stands for no such limit."""

    block_size: int  # on all ranks that divide a context among them
    window: int = 0  # a token sees itself and the ``window - 1`` before it
    chunk: int = 0  # a token sees those of its own chunk before it
    state: str = ""  # what a state consists of, for layers that keep one instead of KV
    is_ring: bool = False  # the state is a ring of the last tokens, in a request's only block
    forgets_answers: bool = False  # tokens behind the prompt are freed while their request runs
    # vLLM caches no block of the window: it computes it anew after a hit, or loads all of it
    is_replayed: bool = False
    # vLLM zeroes its new blocks: other groups' bytes in them may be NaN, and kernels read all of a
    # block (``needs_kv_cache_zeroing`` in ``vllm/v1/kv_cache_interface.py``)
    is_zeroed: bool = False
    shards: int = 1  # ranks that divide a context among them (DCP), each with a part of each block

    @property
    def frees_early(self) -> bool:
        """Whether blocks are freed while their request still runs."""
        return bool(self.window or self.chunk)

    def first_needed(self, computed: int) -> int:
        """Return the first token whose KV is needed by the one after ``computed`` tokens.

        As vLLM's ``get_num_skipped_tokens`` (``vllm/v1/core/single_type_kv_cache_manager.py``).
        """
        if self.state:
            return max(0, computed - 1)
        if self.window:
            return max(0, computed - self.window + 1)
        return computed // self.chunk * self.chunk if self.chunk else 0

    def missing_tokens(self, prompt_tokens: int, external_tokens: int) -> tuple[int, int]:
        """Return the first token that must come from elsewhere and the one after the last.

        The last ``external_tokens`` of the first ``prompt_tokens - 1`` are missing here, less those
        that nothing looks at any more: vLLM always computes the last prompt token itself, because
        it needs its logits.
        """
        computed = prompt_tokens - 1
        cached = 0 if self.is_replayed and external_tokens else computed - external_tokens
        return min(computed, max(cached, self.first_needed(computed))), computed

    def blocks_of(self, start: int, stop: int) -> slice:
        """Return which of a request's blocks the tokens from ``start`` to ``stop`` are in."""
        if self.is_ring:
            return slice(0, 1)
        return slice(start // self.block_size, -(-stop // self.block_size))

    def new_blocks(self, tokens: int, computed: int) -> int:
        """Return how many blocks a request needs for ``tokens``, beside those of ``computed``."""
        return 1 if self.state else -(-tokens // self.block_size) - computed // self.block_size

    def loaded_blocks(self, tokens: int, computed: int) -> int:
        """Return how many blocks a load of ``tokens`` fills, if ``computed`` of them are cached."""
        start, stop = self.missing_tokens(tokens + 1, tokens - computed)
        if self.state:
            return int(start < stop)
        return -(-stop // self.block_size) - start // self.block_size


def left_out_tokens(groups: Iterable[CacheGroup], lookahead: int) -> int:
    """Return how many of the last prompt tokens a prefill engine must not compute for another.

    A decode engine computes the last prompt token itself. The KV of that token does no harm, but a
    state that includes it cannot be stepped back, and a window that vLLM replays must be laid out
    for that token. Drafts that look ``lookahead`` tokens ahead (MTP) would have guesses in their
    KV, which a decode engine would keep. As ``_prefill_backoff`` in vLLM 0.32
    (``kv_connector/v1/nixl/base_scheduler.py``).
    """
    has_exact = any(group.state or group.is_replayed for group in groups)
    return max(1 if has_exact else 0, lookahead - 1)


def moved_tokens(prompt_tokens: int, left_out: int) -> int:
    """Return up to which token a prompt's KV is made for another engine.

    A prompt of so few tokens is not moved.
    """
    return prompt_tokens - left_out if prompt_tokens > left_out else prompt_tokens
