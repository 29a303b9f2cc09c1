"""Reads traces: Mooncake's, lengths, and conversations as in vLLM's benchmarks/multi_turn.

A file is not trusted: its size, the number of its requests and every number in it have a limit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from pdrelay_tools.planning.replay.traces import (
    BYTES_PER_TOKEN,
    BlockNames,
    NoReplay,
    Trace,
    Turn,
    poisson,
)

MOST_BYTES: Final = 256 * 1024 * 1024  # of a file
MOST_REQUESTS: Final = 1_000_000
MOST_TOKENS: Final = 10_000_000  # of a prompt, or of an answer
MOONCAKE_BLOCK: Final = 512  # tokens that each of its hash_ids stands for

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
_CSV: Final = ("prompt_tokens", "output_tokens")
_T = TypeVar("_T")


class _Mooncake(msgspec.Struct):
    """A line of Mooncake's traces (github.com/kvcache-ai/Mooncake, FAST25-release/traces)."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]  # ms
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, le=2**62)]], msgspec.Meta(max_length=MOST_TOKENS)
    ]


_SHOWN: Final = 60  # characters of a line that an error quotes


class _Lengths(msgspec.Struct):
    prompt_tokens: _Tokens
    output_tokens: _Tokens


class _Message(msgspec.Struct):
    role: str
    content: str


class _Conversation(msgspec.Struct):
    """One of vLLM's benchmarks/multi_turn (convert_sharegpt_to_openai.py writes such files)."""

    id: str | int
    messages: list[_Message]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests arrive: a file of lengths or conversations does not say."""

    per_s: float  # requests, or conversations that begin, in a second (Poisson)
    think_s: float  # from the end of an answer to the next turn
    block_tokens: int  # of the engines' blocks
    speed: float  # how many times faster timestamps pass
    seed: int


def read_trace(path: Path, arrivals: Arrivals) -> Trace:
    """Read a file; its first line decides the format.

    Raises NoReplay, with the number of the wrong line.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as exc:
        raise NoReplay(f"{path} cannot be read: {exc.strerror}") from exc
    if len(text) > MOST_BYTES:
        raise NoReplay(f"{path} is larger than {MOST_BYTES:,} bytes: replay a part of it")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise NoReplay(f"{path} is empty")
    if len(lines) > MOST_REQUESTS and not text.lstrip().startswith(b"["):
        raise NoReplay(f"{path} has more than {MOST_REQUESTS:,} requests: replay a part of it")
    first = lines[0][1].lstrip()
    if first.startswith(b"["):
        return _conversations(path, text, arrivals)
    if first.startswith(b"{") and b"hash_ids" in first:
        return _mooncake([_mooncake_row(path, number, line) for number, line in lines], arrivals)
    if first.startswith(b"{"):
        return _lengths([_parsed(path, number, line, _Lengths) for number, line in lines], arrivals)
    header = first.strip().replace(b" ", b"") == b"prompt_tokens,output_tokens"
    if header and len(lines) == 1:
        raise NoReplay(f"{path} has no requests")
    return _lengths([_csv(path, number, line) for number, line in lines[header:]], arrivals)


def _parsed(path: Path, number: int, text: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise NoReplay(f"{path}, line {number}: {exc}") from exc


def _mooncake_row(path: Path, number: int, line: bytes) -> _Mooncake:
    row = _parsed(path, number, line, _Mooncake)
    expected = -(-row.input_length // MOONCAKE_BLOCK)
    if len(row.hash_ids) != expected:
        raise NoReplay(
            f"{path}, line {number}: {row.input_length:,} tokens are {expected:,} hash_ids, not "
            f"{len(row.hash_ids):,}"
        )
    return row


def _csv(path: Path, number: int, line: bytes) -> _Lengths:
    text = line.decode("ascii", "replace")
    try:
        words = dict(zip(_CSV, text.split(","), strict=True))
        return msgspec.convert(words, _Lengths, strict=False)
    except (ValueError, msgspec.MsgspecError) as exc:
        raise NoReplay(
            f"{path}, line {number}: expected prompt_tokens,output_tokens, two whole numbers from "
            f"1 to {MOST_TOKENS}, not {text[:_SHOWN]!r}"
        ) from exc


def _lengths(rows: Sequence[_Lengths], arrivals: Arrivals) -> Trace:
    names = BlockNames(0)
    size = arrivals.block_tokens
    turns = list[Turn]()
    for row, at_s in zip(rows, poisson(arrivals.per_s, arrivals.seed), strict=False):
        blocks = names.new_names(-(-(row.prompt_tokens + row.output_tokens) // size))
        turns.append(Turn(f"r{len(turns)}", blocks, row.prompt_tokens, row.output_tokens, at_s))
    return Trace(size, turns)


def _mooncake(rows: Sequence[_Mooncake], arrivals: Arrivals) -> Trace:
    """Return the requests at their times, each with the request that it continues.

    The trace does not say which. A request continues an earlier one if it begins with all its full
    blocks, and that one was the first to have the last of them. Its next blocks are those of the
    answer.
    """
    names = BlockNames(1 + max(max(row.hash_ids, default=0) for row in rows))
    sessions = list[str]()
    goes_on = list[int | None]()
    ends = dict[int, int]()
    known_blocks = set[int]()
    answers = dict[int, Sequence[int]]()
    for number, row in enumerate(rows):
        full = row.hash_ids[: row.input_length // MOONCAKE_BLOCK]
        before = next((ends[name] for name in reversed(full) if name in ends), None)
        sessions.append(f"r{number}" if before is None else sessions[before])
        goes_on.append(before)
        if before is not None:
            begin, end = _answer_span(rows[before])
            if len(full) >= end:
                answers.setdefault(before, full[begin:end])
        if full and full[-1] not in known_blocks:
            ends[full[-1]] = number
        known_blocks.update(full)
    turns = list[Turn]()
    for number, row in enumerate(rows):
        begin, end = _answer_span(row)
        blocks = [*row.hash_ids[:begin], *answers.get(number, names.new_names(end - begin))]
        # of a prompt, the part that fills no block
        blocks += row.hash_ids[begin : begin + 1] if begin == end else []
        at_s = row.timestamp / 1e3 / arrivals.speed
        turns.append(
            Turn(
                sessions[number], blocks, row.input_length, row.output_length, at_s, goes_on[number]
            )
        )
    return Trace(MOONCAKE_BLOCK, turns)


def _answer_span(row: _Mooncake) -> tuple[int, int]:
    return row.input_length // MOONCAKE_BLOCK, (
        row.input_length + row.output_length
    ) // MOONCAKE_BLOCK


def _conversations(path: Path, text: bytes, arrivals: Arrivals) -> Trace:
    try:
        conversations = msgspec.json.decode(text, type=list[_Conversation])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise NoReplay(
            f"{path} must be a list of conversations with an id and messages: {exc}"
        ) from exc
    turns = list[Turn]()
    begins = poisson(arrivals.per_s, arrivals.seed)
    for conversation in conversations:
        turns += _turns(conversation, next(begins), len(turns), arrivals)
    if not turns:
        raise NoReplay(f"{path} has no conversation with an answer of an assistant")
    if len(turns) > MOST_REQUESTS:
        raise NoReplay(f"{path} has more than {MOST_REQUESTS:,} requests: replay a part of it")
    return Trace(arrivals.block_tokens, turns)


def _turns(
    conversation: _Conversation, begins: float, first: int, arrivals: Arrivals
) -> Iterator[Turn]:
    """Yield a turn for each answer. Without a tokenizer, four characters are a token."""
    tokens = [
        max(1, -(-len(message.content) // BYTES_PER_TOKEN)) for message in conversation.messages
    ]
    padded = zip(conversation.messages, tokens, strict=True)
    text = "".join(message.content.ljust(count * BYTES_PER_TOKEN) for message, count in padded)
    blocks = list(_names(text, arrivals.block_tokens * BYTES_PER_TOKEN))
    total = 0
    number = first
    for message, count in zip(conversation.messages, tokens, strict=True):
        if message.role == "assistant" and total:
            goes_on = number - 1 if number > first else None
            at_s = begins if goes_on is None else arrivals.think_s
            yield Turn(
                str(conversation.id), blocks, total, count, at_s, goes_on, waits=goes_on is not None
            )
            number += 1
        total += count


def _names(text: str, size: int) -> Iterator[int]:
    """Name each block by its text and all text before it."""
    name = b""
    for start in range(0, len(text), size):
        name = blake2b(
            text[start : start + size].encode("utf-8", "surrogatepass"), key=name, digest_size=8
        ).digest()
        yield int.from_bytes(name)
