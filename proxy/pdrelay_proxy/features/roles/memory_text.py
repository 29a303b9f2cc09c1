"""What a router without a shared store keeps of roles: a text that ends with it."""


class MemoryText:
    """A text of this process alone."""

    def __init__(self) -> None:
        self._text = ""

    async def read(self) -> str:
        """Return the text."""
        return self._text

    async def replace(self, text: str, /) -> bool:
        """Write the text."""
        self._text = text
        return True

    async def aclose(self) -> None:
        """Close nothing."""
