"""Words that are members of a short list."""

from enum import StrEnum


class FastStrEnum(StrEnum):
    """An enum of words that is quick to look up: equal to its text, it hashes as its text does.

    Enum's own hash is a Python function, which would be called for every lookup in a table of
    states or a counter.
    """

    __hash__ = str.__hash__
