"""Estimates a prompt's tokens from its bytes: the router has no tokenizer, but engines count."""

from typing import Final

from pdrelay_proxy.core.model import RoutingHints

_UNKNOWN: Final = 0.25  # tokens of a byte before the first count: about as in English
_KEPT: Final = 0.98  # of the weight of earlier counts, with each new one
_MODELS_MOST: Final = 64  # a bound: clients may name any model
_BRACKET: Final = 91
_ZERO = 48
_NINE = 57


class _Counted:
    __slots__ = ("size", "tokens")

    def __init__(self) -> None:
        self.size = 0.0
        self.tokens = 0.0


class TokenCounts:
    """Tokens and bytes of the prompts of each model, separately for prompts of token ids."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str | None, bool], _Counted] = {}

    def per_byte(self, hints: RoutingHints) -> float:
        """Return tokens for each byte of such a prompt's JSON."""
        count = self._counted.get((hints.model, _is_ids(hints.prompt)))
        return _UNKNOWN if count is None else count.tokens / count.size

    def counted(self, hints: RoutingHints, tokens: int) -> None:
        """Learn from an engine's count of a prompt's tokens."""
        size = len(hints.prompt)
        if size == 0 or tokens <= 0:
            return
        key = hints.model, _is_ids(hints.prompt)
        count = self._counted.get(key)
        if count is None:
            if len(self._counted) >= _MODELS_MOST:
                del self._counted[next(iter(self._counted))]
            count = self._counted[key] = _Counted()
        count.size = count.size * _KEPT + size
        count.tokens = count.tokens * _KEPT + tokens


def _is_ids(prompt: bytes | memoryview) -> bool:
    """Tell whether a prompt begins like an array of numbers."""
    return len(prompt) > 1 and prompt[0] == _BRACKET and _ZERO <= prompt[1] <= _NINE
