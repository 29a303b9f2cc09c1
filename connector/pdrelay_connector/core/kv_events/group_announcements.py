"""Announces the KV cache groups of a rank to readers before their first blocks.

A group is announced by a ``BlockStored`` without blocks. The groups come from vLLM
(``EngineCore.get_kv_cache_group_metadata``, vllm/v1/engine/core.py), or from the first event that
stores a block of each.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec

from pdrelay_connector.core.kv_events.event_batch import BlockStored, KVEvent
from pdrelay_connector.errors import ProtocolViolation

MAX_GROUPS = 64  # of a rank; numbers are below that
MAX_KIND = 64  # characters
MEDIUM = "GPU"  # a BlockPool says so on every platform
# vLLM announces groups that it leaves out of prefix caching (``prefix_cacheable``,
# ``vllm/v1/kv_cache_interface.py``), and no block of theirs ever comes, so that a reader would wait
# for ever. They have these kinds; others of these kinds are known by their first block.
_UNCERTAIN = frozenset({"unknown", "sliding_window_mla"})
_WINDOW = "sliding_window"


class _Group(msgspec.Struct):
    group_idx: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]
    kind: Annotated[str, msgspec.Meta(max_length=MAX_KIND)]
    block_size: Annotated[int, msgspec.Meta(ge=1)]  # tokens
    sliding_window: Annotated[int, msgspec.Meta(ge=0)] | None = None  # tokens


class GroupAnnouncements:
    """The known groups of one rank; they do not change while the engine runs."""

    def __init__(self, announcements: Iterable[BlockStored] = ()) -> None:
        self._announced = {event.group_idx: event for event in announcements}

    def events(self) -> list[KVEvent]:
        """Return an event for each group, by their numbers."""
        return [
            event for _, event in sorted(self._announced.items(), key=lambda item: item[0] or 0)
        ]

    def add(self, event: BlockStored) -> bool:
        """Learn the group of an event; return whether something is new.

        Smaller blocks than known ones are parts of those (``cache_partial_block``,
        ``vllm/v1/core/block_pool.py``).
        """
        group = event.group_idx
        kind = event.kv_cache_spec_kind
        if group is None or kind is None or event.medium not in {None, MEDIUM}:
            return False
        earlier = self._announced.get(group)
        size = event.block_size
        window = event.kv_cache_spec_sliding_window
        if earlier is not None and size <= earlier.block_size:
            if earlier.kv_cache_spec_sliding_window is not None or window is None:
                return False
            size = earlier.block_size
        if not 0 <= group < MAX_GROUPS or len(kind) > MAX_KIND or size < 1:
            return False
        self._announced[group] = announcement(group, kind, size, window)
        return True


def announcement(group: int, kind: str, block_size: int, window: int | None) -> BlockStored:
    """Return the event that announces a group; block size and window in tokens."""
    return BlockStored(
        block_hashes=[],
        token_ids=[],
        block_size=block_size,
        medium=MEDIUM,
        group_idx=group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
    )


def read_group_metadata(answer: object) -> tuple[BlockStored, ...]:
    """Return an announcement for each group that vLLM's answer describes completely.

    Raises :exc:`~pdrelay_connector.errors.ProtocolViolation` if it has another form.
    """
    try:
        groups = msgspec.convert(
            answer, Annotated[list[_Group], msgspec.Meta(max_length=MAX_GROUPS)]
        )
    except msgspec.ValidationError as exc:
        raise ProtocolViolation(f"KV cache groups of another form: {exc}") from exc
    return tuple(
        announcement(group.group_idx, group.kind, group.block_size, group.sliding_window)
        for group in groups
        if group.kind not in _UNCERTAIN and (group.kind != _WINDOW or group.sliding_window)
    )
