"""What is known of the token ids of the prompts whose requests are under way."""

from collections import OrderedDict
from typing import Final

from pdrelay_proxy.core.model import RoutingHints
from pdrelay_proxy.core.prompt_blocks import PromptBlocks
from pdrelay_proxy.features.kv_events.core.known_prompts import HeldBeginning, KnownPrefix, KnownPrompts
from pdrelay_proxy.features.kv_events.core.token_blocks import TokenPrompt, token_prompt

BYTES_MOST: Final = 16 << 20  # of prompts; of one there may be more
PROMPTS_MOST: Final = 256


class PromptTokens:
    """One prompt. What was found of it stays as it was when it was looked up first."""

    __slots__ = ("blocks", "cached", "changes", "engines", "held", "ids", "known", "model", "size")

    def __init__(self, hints: RoutingHints, ids: TokenPrompt | None, known: KnownPrefix | None) -> None:
        self.blocks: PromptBlocks = hints.blocks  # names the prompt: no other has the same object
        self.size = len(hints.prompt)
        self.ids = ids  # if it is one of token ids
        self.known = known  # else: the ids of an earlier prompt, with which it begins
        self.held: dict[str, HeldBeginning | None] = {}  # by engine, of that
        self.cached: dict[str, int | None] = {}  # tokens by engine, while the following is so
        self.changes = 0  # of the index
        self.engines = 0  # of the registry
        self.model: str | None = None


class PromptLookup:
    """Reads the prompts of requests once: their engines are chosen, and what these have is asked again later."""

    __slots__ = ("_bytes", "_known", "_latest", "_prompts")

    def __init__(self, known: KnownPrompts | None) -> None:
        """``known``: the token ids of texts and chats; None: only prompts of token ids are looked up."""
        self._known = known
        self._prompts: OrderedDict[int, PromptTokens] = OrderedDict()  # those that were looked up last, by their blocks
        self._latest: PromptTokens | None = None
        self._bytes = 0

    def find(self, hints: RoutingHints, now: float) -> PromptTokens:
        """Return what is known of a prompt."""
        blocks = hints.blocks
        prompt = self._latest
        if prompt is not None and prompt.blocks is blocks:
            return prompt
        prompt = self._prompts.get(id(blocks))
        if prompt is None:
            prompt = self._read(hints, now)
        self._latest = prompt
        return prompt

    def _read(self, hints: RoutingHints, now: float) -> PromptTokens:
        ids = token_prompt(hints.prompt, hints.context)
        known: KnownPrefix | None = None
        if ids is None and self._known is not None and hints.prompt:
            known = self._known.find(hints.blocks, now=now)
        prompt = self._prompts[id(hints.blocks)] = PromptTokens(hints, ids, known)
        self._bytes += prompt.size
        while len(self._prompts) > PROMPTS_MOST or (self._bytes > BYTES_MOST and len(self._prompts) > 1):
            _, oldest = self._prompts.popitem(last=False)
            self._bytes -= oldest.size
        return prompt
