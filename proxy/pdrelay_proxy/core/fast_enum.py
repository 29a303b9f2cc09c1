"""Enums of words with a fast hash.

To look a member of an enum up takes as long as a call. So what each request and each token goes
through has members as constants of its module.
"""

from enum import StrEnum


class FastStrEnum(StrEnum):
    """An enum of words whose members equal their text and hash as fast as it.

    Enum's own hash is a Python function, called at every lookup in a table of states or a counter.
    """

    __hash__ = str.__hash__
