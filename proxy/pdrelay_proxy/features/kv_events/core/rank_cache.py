"""The cache of one data-parallel rank: the blocks of each KV cache group, and hits of prompts.

A model has one or more groups. A hit must be complete in every group with full attention. A group
with a sliding window, or with states, caches blocks at some places only, and needs the last ones
before the end of a hit. vLLM gives equal prefixes equal hashes in all groups, so their blocks are
found by the hash of the full group's block that ends at the same place
(``find_longest_cache_hit`` in vllm/v1/core/kv_cache_coordinator.py).
"""

from math import lcm
from typing import Final

from pdrelay_proxy.features.kv_events.core.known_prompts import CachedBeginning
from pdrelay_proxy.features.kv_events.core.token_blocks import BlockKey, TokenPrompt
from pdrelay_proxy.features.kv_events.event_schemas import BlockHash

BEHIND_MOST: Final = 16_384  # blocks, 2 ms


class GroupBlocks:
    """One KV cache group of a rank."""

    __slots__ = ("child_of", "copies", "hash_of", "is_full", "key_of", "needed", "size")

    def __init__(self, size: int, *, is_full: bool, needed: int) -> None:
        self.size = size  # tokens of a block
        self.is_full = is_full
        self.needed = needed  # blocks before the end of a hit, if it is not full
        self.copies: dict[BlockHash, int] = {}  # how often each block is stored
        self.key_of: dict[BlockHash, BlockKey] = {}  # of a full group
        self.hash_of: dict[BlockKey, BlockHash] = {}
        # the latest block behind each; it may be gone
        self.child_of: dict[BlockKey, BlockKey] = {}

    def clear(self) -> None:
        """Remove all blocks."""
        self.copies = {}
        self.key_of = {}
        self.hash_of = {}
        self.child_of = {}

    def behind(self, key: BlockKey) -> int:
        """Return how many cached blocks follow one, along the latest child of each."""
        child_of = self.child_of
        hash_of = self.hash_of
        count = 0
        child = child_of.get(key)
        while child is not None and child in hash_of and count < BEHIND_MOST:
            count += 1
            child = child_of.get(child)
        return count

    def remove(self, block: BlockHash) -> int:
        """Remove one copy of a block; return 1 if it was the last one, else 0."""
        count = self.copies.get(block, 0)
        if count > 1:
            self.copies[block] = count - 1
            return 0
        if not count:
            return 0
        del self.copies[block]
        key = self.key_of.pop(block, None)
        if key is not None:
            if self.hash_of.get(key) == block:
                del self.hash_of[key]
            if key not in self.hash_of:
                self.child_of.pop(key, None)
        return 1


class RankCache:
    """The cache of one data-parallel rank."""

    __slots__ = ("groups", "is_unclear", "is_whole")

    def __init__(self) -> None:
        self.is_whole = False  # its initial state is complete
        self.is_unclear = False  # it has a group of an unknown kind
        self.groups: dict[int, GroupBlocks] = {}

    def cached(self, prompt: TokenPrompt, lora: str | None) -> int:
        """Return how many tokens of a prompt are cached; vLLM always computes the last one
        (``get_computed_blocks`` in vllm/v1/core/kv_cache_manager.py).
        """
        if len(self.groups) == 1:
            (group,) = self.groups.values()
            return (
                _cached_blocks(group, prompt, (prompt.count - 1) // group.size, lora) * group.size
                if group.is_full
                else 0
            )
        fulls = [group for group in self.groups.values() if group.is_full]
        if not fulls:
            return 0
        hashes: dict[int, BlockHash] = {}
        most = prompt.count
        for group in fulls:
            most = min(most, _walk(group, prompt, lora, hashes))
        step = lcm(*(group.size for group in self.groups.values()))
        tails = [group for group in self.groups.values() if not group.is_full]
        end = most // step * step
        at = 0
        while end and at < len(tails):
            gap = _gap(tails[at], end, hashes)
            if not gap:
                at += 1
                continue
            # It is missing before each end from there on, too. The group that lacks it is asked
            # first from now on: so blocks are seldom looked at twice, whatever an engine tells.
            end = (gap - 1) // step * step
            tails.insert(0, tails.pop(at))
            at = 0
        return end

    def beginning(
        self, prompt: TokenPrompt, count: int, lora: str | None
    ) -> CachedBeginning | None:
        """Return how much of the first ``count`` ids is cached, in groups with full attention.

        Groups with a window or a state need blocks at the end of the hit, which may lie behind.
        None: the ids fill no block, or there is no group with full attention.
        """
        fulls = [group for group in self.groups.values() if group.is_full]
        if not fulls:
            # no groups: no block was ever stored
            return None if self.groups else CachedBeginning(0, 0, is_whole=False)
        least: CachedBeginning | None = None
        for group in fulls:
            size = group.size
            blocks = count // group.size
            if not blocks:
                return None
            cached_blocks = _cached_blocks(group, prompt, blocks, lora)
            is_whole = cached_blocks == blocks
            behind = group.behind(prompt.keys(size, lora)[blocks - 1]) if is_whole else 0
            cached = CachedBeginning(cached_blocks * size, behind * size, is_whole=is_whole)
            least = cached if least is None else common_part(least, cached)
        return least


def _cached_blocks(group: GroupBlocks, prompt: TokenPrompt, most: int, lora: str | None) -> int:
    """Return how many of the first ``most`` blocks a full group has, up to the first miss."""
    size = group.size
    hash_of = group.hash_of
    keys = prompt.keys(size, lora)
    place = 0
    for key in keys:
        if place >= most or key not in hash_of:
            return place
        place += 1
    while place < most and prompt.more(keys, size, lora) in hash_of:
        place += 1
    return place


def _walk(
    group: GroupBlocks, prompt: TokenPrompt, lora: str | None, hashes: dict[int, BlockHash]
) -> int:
    """Return the cached tokens of a full group up to the first miss.

    ``hashes`` gets the hash of each of these blocks, by the place of its end.
    """
    size = group.size
    hash_of = group.hash_of
    place = 0
    keys = prompt.keys(size, lora)
    most = (prompt.count - 1) // size
    while place < most:
        block_hash = hash_of.get(
            keys[place] if place < len(keys) else prompt.more(keys, size, lora)
        )
        if block_hash is None:
            break
        place += 1
        hashes[place * size] = block_hash
    return place * size


def _gap(group: GroupBlocks, end: int, hashes: dict[int, BlockHash]) -> int:
    """Return the end of the last block that a group lacks of those before the end of a hit; 0: it
    has what it needs.

    A place without a known hash counts as a miss.
    """
    for _ in range(group.needed):
        if end <= 0:
            break
        block = hashes.get(end)
        if block is None or block not in group.copies:
            return end
        end -= group.size
    return 0


def common_part(first: CachedBeginning, second: CachedBeginning) -> CachedBeginning:
    """Return the smaller of two cached beginnings, part by part."""
    is_whole = first.is_whole and second.is_whole
    return CachedBeginning(
        min(first.tokens, second.tokens), min(first.beyond, second.beyond), is_whole=is_whole
    )
