"""What vLLM's OffloadingConnector must know of our loads, beside which it is in MultiConnector.

It may copy blocks of a request that has ended, and vLLM may give them to another one at once. Its
workers end such a copy before they begin a step in which these blocks are allocated. But until vLLM
0.33 it does not notice blocks that are allocated for another connector's load
(``update_state_after_alloc`` in ``offloading/scheduler.py``;
https://github.com/vllm-project/vllm/issues/46951): the tier would have other KV than its hash says.
So we name them. A load may begin when the workers have begun the step.

And it copies each full block of a prompt when that is scheduled, also one that a load has filled in
part (``partial_blocks.py``). So such a prompt's copies end before it, as they do where a client's
``max_offload_tokens`` says so.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from pdrelay_connector.shell.building_engine import builder_of


class OffloadedBlocks:
    """Runs on the engine thread."""

    def __init__(self) -> None:
        self._multi = builder_of(MultiConnector)

    @cached_property
    def _offloading(self) -> list[Any]:
        """The other connectors' schedulers, all of which are there at the first step."""
        connectors = [] if self._multi is None else self._multi.sub_connectors
        return [each.scheduler for each in connectors if isinstance(each, OffloadingConnector)]

    @property
    def may_be_copied(self) -> bool:
        """Whether a load must not begin before the workers have begun its step."""
        return bool(self._offloading)

    def allocated(self, tables: Iterable[Iterable[int]]) -> None:
        """Name the blocks of a load, in the step that allocates them."""
        for scheduler in self._offloading:
            for blocks in tables:
                scheduler._current_batch_allocated_block_ids.update(blocks)  # noqa: SLF001

    def leave_out(self, request: str, tokens: int) -> None:
        """Have nothing of a prompt copied but its first tokens."""
        for scheduler in self._offloading:
            status = scheduler._req_status[request]  # noqa: SLF001
            least = [status.max_offload_tokens, tokens]
            status.max_offload_tokens = min(each for each in least if each is not None)
