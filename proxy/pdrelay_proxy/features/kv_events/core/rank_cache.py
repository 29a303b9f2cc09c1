"""One data-parallel rank's cache: the blocks of each KV cache group, and how much of a prompt they
are.

A model has one group or several. A hit must be whole in every group with full attention. A group
with a sliding window, or with states, has a block for few of the places, and needs the last ones
before the hit: vLLM hashes the same beginning of a prompt alike in all groups, so a block of theirs
is found by the hash of the full group's block that ends there.
"""

from math import lcm
from typing import Final

from pdrelay_proxy.features.kv_events.core.known_prompts import HeldBeginning
from pdrelay_proxy.features.kv_events.core.token_blocks import BlockKey, TokenPrompt
from pdrelay_proxy.features.kv_events.event_schemas import BlockHash

BEHIND_MOST: Final = 16_384  # blocks, 2 ms


class GroupBlocks:
    """One KV cache group of a rank."""

    __slots__ = ("child_of", "hash_of", "held", "is_full", "key_of", "needed", "size")

    def __init__(self, size: int, *, is_full: bool, needed: int) -> None:
        self.size = size  # tokens of a block
        self.is_full = is_full
        self.needed = needed  # blocks before the end of a hit, if it is not full
        self.held: dict[BlockHash, int] = {}  # how often
        self.key_of: dict[BlockHash, BlockKey] = {}  # of a full group
        self.hash_of: dict[BlockKey, BlockHash] = {}
        # the block behind one that was stored last; it may be gone
        self.child_of: dict[BlockKey, BlockKey] = {}

    def clear(self) -> None:
        """Forget all blocks."""
        self.held = {}
        self.key_of = {}
        self.hash_of = {}
        self.child_of = {}

    def behind(self, key: BlockKey) -> int:
        """Return how many blocks follow one, each the latest behind the one before it."""
        child_of = self.child_of
        hash_of = self.hash_of
        count = 0
        child = child_of.get(key)
        while child is not None and child in hash_of and count < BEHIND_MOST:
            count += 1
            child = child_of.get(child)
        return count

    def remove(self, block: BlockHash) -> int:
        """Take a block away once; return how many fewer there are to hold."""
        count = self.held.get(block, 0)
        if count > 1:
            self.held[block] = count - 1
            return 0
        if not count:
            return 0
        del self.held[block]
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
        self.is_whole = False  # the state has come to its end
        self.is_unclear = False  # there is a group of which nothing is known
        self.groups: dict[int, GroupBlocks] = {}

    def cached(self, prompt: TokenPrompt, lora: str | None) -> int:
        """Return how many tokens of a prompt need not be computed: vLLM computes at least the last
        one.
        """
        if len(self.groups) == 1:
            (group,) = self.groups.values()
            return (
                _held(group, prompt, (prompt.count - 1) // group.size, lora) * group.size
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
        while end and not all(_has_tail(group, end, hashes) for group in tails):
            end -= step
        return end

    def beginning(self, prompt: TokenPrompt, count: int, lora: str | None) -> HeldBeginning | None:
        """Return what there is of the first ``count`` ids of a prompt, in groups with full
        attention.

        What those with a window or a state need is at the end of a hit, which may lie behind them.
        None: so few ids fill no block, or there is no such group.
        """
        fulls = [group for group in self.groups.values() if group.is_full]
        if not fulls:
            # nothing was ever stored
            return None if self.groups else HeldBeginning(0, 0, is_whole=False)
        least: HeldBeginning | None = None
        for group in fulls:
            size = group.size
            wanted = count // group.size
            if not wanted:
                return None
            found = _held(group, prompt, wanted, lora)
            is_whole = found == wanted
            behind = group.behind(prompt.keys(size, lora)[wanted - 1]) if is_whole else 0
            held = HeldBeginning(found * size, behind * size, is_whole=is_whole)
            least = held if least is None else less_of(least, held)
        return least


def _held(group: GroupBlocks, prompt: TokenPrompt, most: int, lora: str | None) -> int:
    """Return how many blocks a full group has from the beginning on, of ``most``."""
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
    """Return the tokens of the blocks that a full group has from the beginning on; note their
    hashes by their ends.
    """
    size = group.size
    hash_of = group.hash_of
    place = 0
    keys = prompt.keys(size, lora)
    most = (prompt.count - 1) // size
    while place < most:
        found = hash_of.get(keys[place] if place < len(keys) else prompt.more(keys, size, lora))
        if found is None:
            break
        place += 1
        hashes[place * size] = found
    return place * size


def _has_tail(group: GroupBlocks, end: int, hashes: dict[int, BlockHash]) -> bool:
    """Tell whether a group has what it needs before the end of a hit; a place that cannot be named
    counts as absent.
    """
    for _ in range(group.needed):
        if end <= 0:
            break
        block = hashes.get(end)
        if block is None or block not in group.held:
            return False
        end -= group.size
    return True


def less_of(one: HeldBeginning, other: HeldBeginning) -> HeldBeginning:
    """Return what both have."""
    is_whole = one.is_whole and other.is_whole
    return HeldBeginning(
        min(one.tokens, other.tokens), min(one.beyond, other.beyond), is_whole=is_whole
    )
