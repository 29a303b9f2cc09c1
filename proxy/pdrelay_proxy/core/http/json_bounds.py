"""Limits how many names, strings and items a client's JSON may have: parsing a million takes
seconds.

Nearly all bodies cannot exceed a limit, which counting bytes shows. The others are scanned: each
piece of at most 64 KiB loses its strings in one step, and the rest of it is counted. A large
vocabulary of ``logit_bias`` and hundreds of tools are no attack, so only the names that the router
keeps, those of the body itself, have a narrow limit.
"""

import re
from typing import Final

from pdrelay_proxy.core.raw_json import NULL, Fields
from pdrelay_proxy.errors import BadRequest

NAMES_MOST: Final = 4096  # of the body itself
INNER_NAMES_MOST: Final = 65_536  # of an object within it
ALL_NAMES_MOST: Final = 262_144  # of all objects of a body
OBJECTS_MOST: Final = 262_144  # of a body that has many names
STRINGS_MOST: Final = 1_048_576  # the same
_TOKENS_MOST: Final = 262_144  # strings and brackets of an array whose items are counted
PROMPTS_MOST: Final = 4096  # in one array
_STEP: Final = 64 * 1024  # bytes
_NAME_LEAST: Final = 4  # bytes of a name with its quotes, its colon and some of its value
_ITEM_LEAST: Final = 2  # bytes of an item and its comma
# bytes of a body that cannot exceed a limit
SMALL: Final = min(NAMES_MOST * _NAME_LEAST, PROMPTS_MOST * _ITEM_LEAST)
_UNCOUNTED: Final = bytes(set(range(256)) - set(b"{}:"))
_OUTER: Final = re.compile(rb'["\[\]{},]')
_INNER: Final = re.compile(rb'["\[\]{}]')
_IN_STRING: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_EMPTY: Final = re.compile(rb"\[[ \t\r\n]*+\]")
# The fields of vLLM's requests that may be arrays of prompts.
_ARRAYS: Final = (
    "prompt",
    "input",
    "inputs",
    "texts",
    "documents",
    "queries",
    "text_1",
    "text_2",
    "data_1",
    "data_2",
)


def check_names(body: bytes) -> None:
    """Accept a JSON text within the limits of names, strings and objects. Invalid JSON is left to
    its parser.

    Raises:
        BadRequest: an object, or all of them together, have more names, or there are too many
            strings or objects.
    """
    if len(body) <= NAMES_MOST * _NAME_LEAST or body.count(b":") <= NAMES_MOST:
        return
    # names of the open objects, the outer ones first; the 0 stands outside of all objects
    counts = [0]
    total = 0
    objects = 0
    quotes = 0  # that begin or end a string
    offset = 0
    while offset < len(body):
        step = body[offset : offset + _STEP]
        if len(step) == _STEP and (_STEP - len(step.rstrip(b"\\"))) % 2:
            step = step[:-1]  # no escape is cut in two
        offset += len(step)
        parts = step.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        piece = b"".join(parts[quotes % 2 :: 2])  # without its strings
        quotes += len(parts) - 1
        total += piece.count(b":")
        objects += piece.count(b"{")
        if total > ALL_NAMES_MOST:
            raise BadRequest(
                f"the body has more than {ALL_NAMES_MOST} names: it may have at most that"
            )
        if quotes > 2 * STRINGS_MOST:
            raise BadRequest(
                f"the body has more than {STRINGS_MOST} strings: it may have at most that"
            )
        if objects > OBJECTS_MOST:
            raise BadRequest(
                f"the body has more than {OBJECTS_MOST} objects: it may have at most that"
            )
        _count_names(piece, counts)


def _count_names(piece: bytes, counts: list[int]) -> None:
    """Add the names in a piece without its strings to those of the open objects."""
    # The colons behind each brace, which stands before them only if it ends an object: to look for
    # the braces one by one takes five times as long.
    runs = piece.translate(None, _UNCOUNTED).replace(b"}", b"{}").split(b"{")
    counts[-1] += len(runs.pop(0))
    for run in runs:
        if counts[-1] > NAMES_MOST:
            _check_object(counts)
        if run[:1] != b"}":
            counts.append(len(run))
            continue
        if len(counts) > 1:
            counts.pop()
        counts[-1] += len(run) - 1
    if counts[-1] > NAMES_MOST:
        _check_object(counts)


def _check_object(counts: list[int]) -> None:
    if len(counts) == 1:
        return  # no object: this is no JSON that we take
    if len(counts) == 2:
        raise BadRequest(
            f"the body itself has more than {NAMES_MOST} names: it may have at most that"
        )
    if counts[-1] > INNER_NAMES_MOST:
        raise BadRequest(
            f"an object of the body has more than {INNER_NAMES_MOST} names: it may have at most "
            f"that"
        )


def check_prompts(fields: Fields, size: int) -> None:
    """Accept arrays with at most so many prompts; ``size``: bytes of the body.

    A list of token ids is one prompt.

    Raises:
        BadRequest: one of them has more.
    """
    if size <= PROMPTS_MOST * _ITEM_LEAST:
        return
    for name in _ARRAYS:
        value = bytes(fields.get(name, NULL))
        if (
            value[:1] != b"["
            or value[1:].lstrip()[:1].isdigit()
            or value.count(b",") < PROMPTS_MOST
        ):
            continue
        if count_items(value, PROMPTS_MOST) > PROMPTS_MOST:
            raise BadRequest(
                f"{name} has more than {PROMPTS_MOST} items: it may have at most that", param=name
            )


def count_items(array: bytes, limit: int) -> int:
    """Return how many items a JSON array has; counting ends beyond ``limit`` (1 or more)."""
    if _EMPTY.match(array):
        return 0
    count = 1
    depth = 0
    offset = 1
    for _ in range(_TOKENS_MOST):
        token = _next(_INNER if depth else _OUTER, array, offset)
        if token is None:
            return count
        offset = token.end()
        mark = token[0]
        if mark == b'"':
            offset = _end_of_string(array, offset)
        elif mark == b",":
            count += 1
            if count > limit:
                return count
        elif mark in (b"[", b"{"):
            depth += 1
        elif depth == 0:
            return count
        else:
            depth -= 1
    return limit + 1


def _next(token: re.Pattern[bytes], text: bytes, offset: int) -> re.Match[bytes] | None:
    """Return the next match of a token from ``offset`` on."""
    while offset < len(text):
        if match := token.search(text, offset, offset + _STEP):
            return match
        offset += _STEP
    return None


def _end_of_string(text: bytes, offset: int) -> int:
    """Return the place behind a string whose first character is at ``offset``."""
    while offset < len(text):
        match = _IN_STRING.match(text, offset, offset + _STEP)
        end = offset if match is None else match.end()
        if text[end : end + 1] == b'"':
            return end + 1
        if end == offset:  # a backslash at the very end of the text
            return len(text)
        offset = end
    return offset
