"""How many tokens a prompt has, estimated from its bytes: the router has no tokenizer, and engines
count.
"""

from typing import Final

from pdrelay_proxy.core.model import RoutingHints

_UNKNOWN: Final = 0.25  # tokens for a byte, before an engine has counted any: about that of English
_KEPT: Final = 0.98  # of the weight of what was counted before, with each count
_MODELS_MOST: Final = 64  # clients can think of models without end
_BRACKET: Final = 91
_ZERO = 48
_NINE = 57


class _Counted:
    __slots__ = ("size", "tokens")

    def __init__(self) -> None:
        self.size = 0.0
        self.tokens = 0.0


class TokenCounts:
    """Tokens and bytes of the prompts of each model; prompts of token ids by themselves: they are
    longer.
    """

    def __init__(self) -> None:
        self._counted: dict[tuple[str | None, bool], _Counted] = {}

    def per_byte(self, hints: RoutingHints) -> float:
        """Return tokens for each byte of such a prompt's JSON."""
        found = self._counted.get((hints.model, _is_ids(hints.prompt)))
        return _UNKNOWN if found is None else found.tokens / found.size

    def counted(self, hints: RoutingHints, tokens: int) -> None:
        """An engine has counted the tokens of a prompt."""
        size = len(hints.prompt)
        if size == 0 or tokens <= 0:
            return
        key = hints.model, _is_ids(hints.prompt)
        found = self._counted.get(key)
        if found is None:
            if len(self._counted) >= _MODELS_MOST:
                del self._counted[next(iter(self._counted))]
            found = self._counted[key] = _Counted()
        found.size = found.size * _KEPT + size
        found.tokens = found.tokens * _KEPT + tokens


def _is_ids(prompt: bytes | memoryview) -> bool:
    """Tell whether it begins like an array of numbers."""
    return len(prompt) > 1 and prompt[0] == _BRACKET and _ZERO <= prompt[1] <= _NINE
