"""Blocks that a connector beside us in MultiConnector could not load, and what comes of them.

Such a connector loads before a step is computed (``get_num_new_matched_tokens`` returns False, as
LMCache's does) and names bad blocks with the step's output. vLLM then computes them anew, or ends
the requests (``_handle_invalid_blocks`` in ``v1/core/sched/scheduler.py``, 0.30 to 0.33). But:

- It has scheduled the next step before, which computes from them and may end the prompt.
- What it computes anew may be of other tokens (https://github.com/vllm-project/vllm/issues/49250).
- A request that shares such a block goes on from what was computed of it, while the first request
  still computes it anew.
- A request with a sliding window may hit only what was computed of it, and is not noticed at all.
- Its prefix cache keeps the blocks, those of a request that it has ended or preempted meanwhile,
  and those that others have computed of them.

So no KV of such a request is handed over, and none of its blocks stays in the prefix cache.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput

from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.shell.decode_modes import BlockTables
from pdrelay_connector.shell.sliding_windows import NULL


class _Step(NamedTuple):
    """A step in flight, and the blocks of requests that have entered it or one before."""

    number: int
    tables: Mapping[str, BlockTables]


class BadBlocks:
    """Everything runs on the engine thread."""

    def __init__(self, groups: Sequence[CacheGroup], pool: Callable[[], BlockPool]) -> None:
        self._groups = groups
        self._pool = pool
        # requests with bad KV, by vLLM's id -> the first token that may have it
        self._spoilt: dict[str, int] = {}
        self._new: list[str] = []  # of these, for take_spoilt()
        self._steps: deque[_Step] = deque()  # from the first on that loads
        self._loading = 0  # number of the last step that loads
        self._ended = 0  # number of the last one that has ended

    def __len__(self) -> int:
        return len(self._spoilt) + len(self._steps)

    @property
    def may_come(self) -> bool:
        """Whether a step in flight loads: the token of a request that ends now may be wrong."""
        return bool(self._steps)

    def scheduled(self, output: SchedulerOutput, number: int) -> bool:
        """Note a step that computes tokens; return whether its end must be known."""
        state = output.kv_connector_block_state
        if state is None:
            return False
        if output.has_sync_kv_loads:
            self._loading = number
        loads = self._loading > self._ended
        if not loads and not self._spoilt:
            return False
        # only such requests can have blocks that a step in flight loads
        entered = {new.req_id for new in output.scheduled_new_reqs}
        entered |= output.scheduled_cached_reqs.resumed_req_ids
        entered.update(self._spoilt, *(step.tables for step in self._steps))
        tables = {  # in vLLM's order: a request may hit what one before it computes in this step
            own: state.resolve_block_ids(own)
            for own in output.num_scheduled_tokens
            if own in entered
        }
        if loads:
            self._steps.append(_Step(number, tables))
        bad: set[int] = set()
        for own in self._spoilt.keys() & tables.keys():
            bad.update(self._blocks_from(tables[own], self._spoilt[own]))
        self._spread(bad, [tables])
        return loads

    def ended(self, step: int, invalid: Set[int]) -> Set[int]:
        """A step has ended, and these blocks could not be loaded; return all blocks with bad KV.

        ``step``: its number; 0 if its end need not be known.
        """
        bad = set(invalid)
        self._spread(bad, [each.tables for each in self._steps])
        self._ended = max(self._ended, step)
        while self._steps and self._steps[0].number <= self._ended:
            self._steps.popleft()
        return bad

    def take_spoilt(self) -> list[str]:
        """Return the requests that were found to have bad KV since the last call."""
        new = self._new
        self._new = []
        return new

    def finished(self, request: str, blocks: BlockTables) -> bool:
        """A request has ended with these blocks; return whether it may have had bad KV."""
        if (start := self._spoilt.pop(request, None)) is None:
            return False
        self._pool().evict_blocks(set(self._blocks_from(blocks, start)))
        return True

    def forget(self, request: str) -> None:
        """A request that was found to have bad KV has ended before."""
        del self._spoilt[request]

    def _spread(self, bad: set[int], steps: Iterable[Mapping[str, BlockTables]]) -> None:
        """Find the requests with bad blocks, add what they compute of them, and evict all of it."""
        if not bad:
            return
        found: set[int] = set()
        for tables in steps:
            for request, blocks in tables.items():
                start = self._first_bad(blocks, bad)
                if start is None:
                    continue
                if request not in self._spoilt:
                    self._new.append(request)
                self._spoilt[request] = min(start, self._spoilt.get(request, start))
                found.update(self._blocks_from(blocks, start))
                bad |= found
        self._pool().evict_blocks(found)

    def _first_bad(self, blocks: BlockTables, bad: Container[int]) -> int | None:
        """Return the first token in a bad block."""
        found = (
            number * group.block_size
            for group, ids in zip(self._groups, blocks, strict=True)
            for number, block in enumerate(ids)
            if block in bad
        )
        return min(found, default=None)

    def _blocks_from(self, blocks: BlockTables, token: int) -> Iterable[int]:
        """Yield the blocks of all groups from a token on."""
        for group, ids in zip(self._groups, blocks, strict=True):
            yield from (block for block in ids[token // group.block_size :] if block != NULL)
