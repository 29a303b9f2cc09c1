"""The token ids of earlier texts and chats, by which later prompts are looked up in caches.

The router has no tokenizer. A prefill engine's answer has the token ids of its prompt, and a later
prompt that begins with the same blocks of text (core/prompt_blocks.py) begins with the same tokens,
up to a seam: a chat template ends a prompt with the beginning of the assistant's message, and some
templates write that differently once the message is there.

The number of tokens up to the end of a block is known exactly if an earlier prompt ended there. For
other blocks there is a lower bound: no tokenizer makes more tokens than bytes, so the text behind
the block has at most as many tokens as bytes.
"""

from collections import Counter, OrderedDict
from typing import Final

from pdrelay_proxy.core.prompt_blocks import PromptBlocks
from pdrelay_proxy.features.kv_events.core.token_blocks import TokenPrompt

BYTES_MOST: Final = 64 * 1024 * 1024  # of all prompts: seven million tokens
SEAM: Final = 16  # tokens at the end of a prompt that may differ in a longer one
_PLACES_MOST: Final = 32  # blocks of a prompt for which a lower bound is kept
# The memory of a prompt, measured; it includes the keys of cache blocks of 16 tokens.
_TOKEN_BYTES: Final = 9
_PLACE_BYTES: Final = 200
_PROMPT_BYTES: Final = 1000


class CachedBeginning:
    """How much of a prompt's known beginning one engine has cached. It does not change."""

    __slots__ = ("beyond", "is_whole", "tokens")

    def __init__(self, tokens: int, beyond: int, *, is_whole: bool) -> None:
        self.tokens = tokens  # of whole cache blocks, from the beginning on
        # tokens of the engine's blocks behind it, of this prompt or another
        self.beyond = beyond
        self.is_whole = is_whole  # it has every block of the known beginning


class KnownPrefix:
    """The known beginning of a prompt: token ids of an earlier one."""

    __slots__ = ("byte_share", "cached", "count", "has_media", "is_all", "owner", "size", "tokens")

    def __init__(
        self,
        owner: int,
        tokens: TokenPrompt,
        count: int,
        size: int,
        byte_share: float,
        *,
        is_all: bool,
        has_media: bool,
    ) -> None:
        self.owner = owner  # the name of the earlier prompt
        self.tokens = tokens  # its ids
        self.count = count  # so many ids are the beginning of this prompt
        self.size = size  # bytes of this beginning
        self.byte_share = byte_share  # bytes for each token of the earlier prompt
        self.is_all = is_all  # the prompts are equal
        self.has_media = has_media  # the tokens of images do not follow from bytes
        # by instance, for as long as one request is routed
        self.cached: dict[str, CachedBeginning | None] = {}


class _Prompt:
    """One remembered prompt."""

    __slots__ = ("at", "cost", "places", "size", "tokens")

    def __init__(self, tokens: TokenPrompt, size: int, places: dict[int, int], at: float) -> None:
        self.tokens = tokens
        self.size = size  # bytes
        self.places = places  # by the name of a block of text: the tokens up to its end
        self.at = at  # when it was used last
        self.cost = tokens.count * _TOKEN_BYTES + len(places) * _PLACE_BYTES + _PROMPT_BYTES


class KnownPrompts:
    """Remembered prompts, by the names of their blocks; the least recently used go first.

    A prompt replaces the one that it continues. Times are seconds of a monotonic clock.
    """

    def __init__(self, lifetime_s: float, *, most: int = BYTES_MOST) -> None:
        self._lifetime_s = lifetime_s  # without use
        self._most = most
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()  # by the name of the last block
        # the prompt in which a block's tokens are known, by the name of the block
        self._owners: dict[int, int] = {}
        self.bytes = 0  # of all of them, about
        # by event: learned, continued, evicted, expired and others
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._prompts)

    def find(self, blocks: PromptBlocks, *, now: float) -> KnownPrefix | None:
        """Return the known beginning of a prompt; None: nothing is known."""
        place, owner = self._longest(blocks, now)
        if place < 0:
            return None
        prompt = self._prompts[owner]
        is_all = (
            place + 1 == len(blocks.names) and blocks.is_compared and owner == blocks.names[place]
        )
        is_all = is_all and prompt.size == blocks.size
        count = prompt.places[blocks.names[place]] - (0 if is_all else SEAM)
        if count <= 0:
            return None
        share = prompt.size / prompt.tokens.count
        size = blocks.size if is_all else min(blocks.ends[place], int(count * share))
        return KnownPrefix(
            owner, prompt.tokens, count, size, share, is_all=is_all, has_media=blocks.has_media
        )

    def learn(
        self, blocks: PromptBlocks, tokens: TokenPrompt, *, is_even: bool, now: float
    ) -> None:
        """Remember the tokens of a prompt, from a prefill engine's answer.

        ``is_even``: its tokens come in the order of its text, so blocks near its end have a lower
        bound.
        """
        names = blocks.names
        if not names or not blocks.is_compared or not tokens.count:
            return
        places = {names[-1]: tokens.count}
        if is_even:
            _add_bounds(places, blocks, tokens.count)
        place, owner = self._longest(blocks, now)
        if place >= 0:
            self._continue(owner, places, blocks, tokens)
        if names[-1] in self._prompts:
            self._drop(names[-1])
        prompt = self._prompts[names[-1]] = _Prompt(tokens, blocks.size, places, now)
        for name in places:
            self._owners[name] = names[-1]
        self.bytes += prompt.cost
        self.counts["learned"] += 1
        self._shrink(now)

    def used(self, prefix: KnownPrefix, *, now: float) -> None:
        """Mark a beginning as used: a request with it was sent."""
        prompt = self._prompts.get(prefix.owner)
        if prompt is not None:
            prompt.at = now
            self._prompts.move_to_end(prefix.owner)

    def _longest(self, blocks: PromptBlocks, now: float) -> tuple[int, int]:
        """Return the place of the last block with known tokens, and its prompt; place -1: none."""
        owners = self._owners
        names = blocks.names
        oldest = now - self._lifetime_s
        for place in range(len(names) - 1, -1, -1):
            owner = owners.get(names[place])
            if owner is not None and self._prompts[owner].at >= oldest:
                return place, owner
        return -1, 0

    def _continue(
        self, owner: int, places: dict[int, int], blocks: PromptBlocks, tokens: TokenPrompt
    ) -> None:
        """Take over an earlier prompt's blocks, and forget it if no other block is left.

        If equal texts have different tokens, the template rewrites earlier messages: then only the
        common tokens count.
        """
        earlier = self._prompts[owner]
        names = frozenset(blocks.names)
        common = tokens.common(earlier.tokens)
        own = 0
        tokens.adopt_keys(earlier.tokens, common)
        for name, count in earlier.places.items():
            if name in names:
                places[name] = max(places.get(name, 0), count) if count <= common else common
            else:
                own += name != owner
        if not own and common >= earlier.tokens.count - SEAM:
            self._drop(owner)
            self.counts["continued"] += 1

    def _drop(self, owner: int) -> None:
        prompt = self._prompts.pop(owner)
        owners = self._owners
        for name in prompt.places:
            if owners.get(name) == owner:
                del owners[name]
        self.bytes -= prompt.cost

    def _shrink(self, now: float) -> None:
        oldest = now - self._lifetime_s
        while self._prompts:
            owner, prompt = next(iter(self._prompts.items()))
            if self.bytes > self._most:
                self.counts["evicted"] += 1
            elif prompt.at < oldest:
                self.counts["expired"] += 1
            else:
                break
            self._drop(owner)


def _add_bounds(places: dict[int, int], blocks: PromptBlocks, count: int) -> None:
    """Add lower bounds for the last blocks: the text behind has at most as many tokens as bytes."""
    for place in range(len(blocks.names) - 2, max(-1, len(blocks.names) - 2 - _PLACES_MOST), -1):
        tokens = count - (blocks.size - blocks.ends[place])
        if tokens <= count // 2 or tokens <= SEAM:
            break
        places[blocks.names[place]] = tokens
