"""How many bytes of one prompt each engine was found to have, while its engines are chosen."""

from pdrelay_proxy.core.known_prompts import KnownPrefix
from pdrelay_proxy.core.prompt_blocks import PromptBlocks
from pdrelay_proxy.core.token_blocks import TokenPrompt


class FoundMatches:
    """What was found for one request, for as long as the caches, the engines and the time are nearly the same."""

    __slots__ = ("at", "blocks", "coming", "engines", "events", "known", "prompt", "there", "told", "told_tokens")

    def __init__(  # noqa: PLR0917 (by name they cost several hundred instructions more)
        self,
        at: float,
        told: int,
        events: int,
        engines: int,
        blocks: PromptBlocks,
        prompt: TokenPrompt | None,
        known: KnownPrefix | None,
    ) -> None:
        """``at``: seconds; ``told``, ``events``, ``engines``: changes of the memory, the index, the registry."""
        self.at = at
        self.told = told
        self.events = events
        self.engines = engines
        self.blocks = blocks  # what is looked up by what was sent
        self.prompt = prompt  # what is looked up by engines' events, if it is known
        self.known = known  # or its beginning
        self.there: dict[str, int] = {}  # bytes by instance
        self.coming: dict[str, int] = {}  # likewise, with what is on its way
        self.told_tokens: dict[str, int | None] = {}  # tokens of what is known, by instance, by its events
