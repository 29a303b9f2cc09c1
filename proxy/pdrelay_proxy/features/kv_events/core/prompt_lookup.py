"""Finds the known token ids of the prompts of current requests."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from pdrelay_proxy.core.model import RoutingHints
from pdrelay_proxy.core.prompt_blocks import PromptBlocks
from pdrelay_proxy.features.kv_events.core.known_prompts import KnownPrefix, KnownPrompts
from pdrelay_proxy.features.kv_events.core.token_blocks import TokenPrompt, token_prompt

BYTES_MOST: Final = 16 << 20  # of prompts; of one there may be more
PROMPTS_MOST: Final = 256


class PromptTokens:
    """The token ids of one prompt, as they were known at the first look-up."""

    __slots__ = ("blocks", "ids", "prefix", "size")

    def __init__(
        self, blocks: PromptBlocks, size: int, ids: TokenPrompt | None, prefix: KnownPrefix | None
    ) -> None:
        self.blocks = blocks  # identifies the prompt: no other one has this object
        self.size = size  # bytes
        self.ids = ids  # of a prompt of token ids
        self.prefix = prefix  # of a text or chat: the ids of an earlier prompt that it begins with


class PromptLookup:
    """Looks each prompt up once: the choice of engines asks, and later listeners ask again."""

    __slots__ = ("_bytes", "_clock", "_latest", "_prompts", "known_prompts")

    def __init__(self, known_prompts: KnownPrompts | None, clock: Callable[[], float]) -> None:
        """``known_prompts``: of texts and chats; None: only prompts of token ids are looked up."""
        self.known_prompts = known_prompts
        self._clock = clock  # seconds; the one of the fleet
        # the latest look-ups, by the id of their blocks
        self._prompts: OrderedDict[int, PromptTokens] = OrderedDict()
        self._latest: PromptTokens | None = None
        self._bytes = 0

    def find(self, hints: RoutingHints) -> PromptTokens:
        """Return the known token ids of a prompt."""
        blocks = hints.blocks
        prompt = self._latest
        if prompt is not None and prompt.blocks is blocks:
            return prompt
        prompts = self._prompts
        prompt = prompts.get(id(blocks))
        if prompt is None:
            ids = token_prompt(hints.prompt, hints.context)
            prefix: KnownPrefix | None = None
            if ids is None and self.known_prompts is not None and hints.prompt:
                prefix = self.known_prompts.find(blocks, now=self._clock())
            prompt = prompts[id(blocks)] = PromptTokens(blocks, len(hints.prompt), ids, prefix)
            self._bytes += prompt.size
            while len(prompts) > PROMPTS_MOST or (self._bytes > BYTES_MOST and len(prompts) > 1):
                _, oldest = prompts.popitem(last=False)
                self._bytes -= oldest.size
        self._latest = prompt
        return prompt
