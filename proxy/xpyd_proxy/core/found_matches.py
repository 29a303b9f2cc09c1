"""How many bytes of one prompt each engine was found to have, while its engines are chosen."""


class FoundMatches:
    """What was found for one request, for as long as the caches, the engines and the time are nearly the same."""

    __slots__ = ("at", "coming", "engines", "events", "there", "told", "told_tokens")

    def __init__(self, at: float, told: int, events: int, engines: int) -> None:
        """``at``: seconds; ``told``, ``events``, ``engines``: changes of the memory, the index, the registry."""
        self.at = at
        self.told = told
        self.events = events
        self.engines = engines
        self.there: dict[str, int] = {}  # bytes by instance
        self.coming: dict[str, int] = {}  # likewise, with what is on its way
        self.told_tokens: dict[str, int | None] = {}  # tokens by instance, by its events
