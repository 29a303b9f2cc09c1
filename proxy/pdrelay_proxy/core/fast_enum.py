"""Enums of words with a fast hash."""

from enum import StrEnum


class FastStrEnum(StrEnum):
    """An enum of words whose members equal their text and hash as fast as it.

    Enum's own hash is a Python function, called at every lookup in a table of states or a counter.
    """

    __hash__ = str.__hash__
