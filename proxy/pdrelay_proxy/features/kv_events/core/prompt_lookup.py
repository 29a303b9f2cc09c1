"""What is known of the token ids of the prompts whose requests are under way."""

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
    """One prompt. What was found of it stays as it was when it was looked up first."""

    __slots__ = ("blocks", "ids", "known", "size")

    def __init__(
        self, blocks: PromptBlocks, size: int, ids: TokenPrompt | None, known: KnownPrefix | None
    ) -> None:
        self.blocks = blocks  # names the prompt: no other has the same object
        self.size = size  # bytes
        self.ids = ids  # if it is one of token ids
        self.known = known  # else: the ids of an earlier prompt, with which it begins


class PromptLookup:
    """Reads the prompts of requests once: their engines are chosen, and what these have is asked
    again later.
    """

    __slots__ = ("_bytes", "_clock", "_latest", "_prompts", "known")

    def __init__(self, known: KnownPrompts | None, clock: Callable[[], float]) -> None:
        """``known``: the token ids of texts and chats; None: only prompts of token ids are looked
        up.
        """
        self.known = known
        self._clock = clock  # seconds; the one of the fleet
        # those that were looked up last, by their blocks
        self._prompts: OrderedDict[int, PromptTokens] = OrderedDict()
        self._latest: PromptTokens | None = None
        self._bytes = 0

    def find(self, hints: RoutingHints) -> PromptTokens:
        """Return what is known of a prompt."""
        blocks = hints.blocks
        prompt = self._latest
        if prompt is not None and prompt.blocks is blocks:
            return prompt
        prompts = self._prompts
        prompt = prompts.get(id(blocks))
        if prompt is None:
            ids = token_prompt(hints.prompt, hints.context)
            known: KnownPrefix | None = None
            if ids is None and self.known is not None and hints.prompt:
                known = self.known.find(blocks, now=self._clock())
            prompt = prompts[id(blocks)] = PromptTokens(blocks, len(hints.prompt), ids, known)
            self._bytes += prompt.size
            while len(prompts) > PROMPTS_MOST or (self._bytes > BYTES_MOST and len(prompts) > 1):
                _, oldest = prompts.popitem(last=False)
                self._bytes -= oldest.size
        self._latest = prompt
        return prompt
