"""How long tests search for an example that breaks a rule."""

from hypothesis import settings

_USUAL = 100  # of Hypothesis, where no profile says another number
_LEAST = 5


def examples(count):
    """Return how many examples to try where a whole search tries ``count``: a profile changes all alike."""
    return max(_LEAST, count * settings.default.max_examples // _USUAL)
