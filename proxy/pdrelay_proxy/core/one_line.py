"""Words of engines, pods and clients on one line: a line break in them must not look like another
line of a log.
"""

import re
from typing import Final

# Line breaks and other control characters, those that change the direction of what follows, and
# halves of pairs. Raw: mypyc takes no literal with a half of a pair, and the pattern reads the
# escapes itself.
_ODD: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def one_line(text: str) -> str:
    r"""Return a text with escapes in place of what would break or bend its line, as \n."""
    return text if text.isprintable() else _ODD.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
