"""How many tokens of prompt and answer a client was served, for quotas and fair shares."""

import re
from typing import Final

from xpyd_proxy.core.request_record import CLIENT_CLOSED_REQUEST, RequestRecord

# The names of the four APIs. A quotation mark inside of a JSON text is escaped, so no generated text looks like this.
_USAGE: Final = re.compile(rb'"(prompt|input|completion|output)_tokens": ?([0-9]{1,9})')


def served_tokens(record: RequestRecord, status: int, prompt: int, events: int) -> int:
    """Return the tokens of a request that is over with this status; ``prompt``: about how many its prompt has;
    ``events``: of its stream.

    Engines count them in the usage at the end of an answer. A stream without usage, or which broke off, has one token
    an event, and its prompt is as long as the prefill engine said. What was refused or has failed costs nothing.
    """
    if status >= 400 and status != CLIENT_CLOSED_REQUEST:
        return 0
    found = {each[1]: int(each[2]) for each in _USAGE.finditer(b"".join(record.end))}  # the last ones
    if record.prefill is not None and record.prefill.tokens is not None:
        prompt = record.prefill.tokens
    prompt = found.get(b"prompt", found.get(b"input", prompt))
    return prompt + found.get(b"completion", found.get(b"output", events))
