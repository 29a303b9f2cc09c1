"""Texts of engines, pods and clients in messages: on one line, for a line break in one must not
look like a new line of a log, and no longer than a message has room for.
"""

import re
from typing import Final

# Line breaks and other control characters, changes of the writing direction, and lone surrogates.
# Raw: mypyc allows no literal with a lone surrogate, and the pattern parses the escapes itself.
_ODD: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def one_line(text: str) -> str:
    r"""Return a text with escapes in place of what would break or bend its line, as \n."""
    return text if text.isprintable() else _ODD.sub(_escaped, text)


def shortened(text: str, most: int = 500) -> str:
    """Cut a text that somebody else may have written at length."""
    return text if len(text) <= most else f"{text[:most]}..."


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
