"""Traces: the requests of clients, turn by turn; and generators of traces."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

# of the text that replaces a prompt: about as in English
BYTES_PER_TOKEN: Final = 4

IDS_LEAST: Final = 3  # token ids by which blocks differ


class NoReplay(Exception):
    """This trace cannot be replayed with these engines; the message says why, in one sentence."""


def token_ids(name: int, size: int) -> Sequence[int]:
    """Return the token ids of a block: three digits each, different for 900**3 blocks."""
    return [100 + name // 900 ** (place % IDS_LEAST) % 900 for place in range(size)]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: a turn of a conversation.

    ``blocks`` names the blocks of its prompt and answer; equal names mean equal KV and an equal
    prefix.
    """

    session: str
    blocks: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    at_s: float  # when it comes; if it waits: seconds after the end of the turn before it
    goes_on: int | None = None  # the number of the turn before it in its conversation
    waits: bool = False  # for the end of that turn


@dataclass(frozen=True, slots=True)
class Trace:
    """All turns; each comes after the turn that it continues."""

    block_tokens: int  # tokens of a block
    turns: Sequence[Turn]

    def full_blocks(self, turn: Turn) -> Sequence[int]:
        """Return the blocks that the prompt fills: only those can be found in a prefix cache."""
        return turn.blocks[: turn.prompt_tokens // self.block_tokens]

    def answer_blocks(self, turn: Turn) -> Sequence[int]:
        """Return the blocks that the answer fills."""
        first = turn.prompt_tokens
        end = turn.prompt_tokens + turn.output_tokens
        return turn.blocks[first // self.block_tokens : end // self.block_tokens]

    def text(self, number: int) -> bytes:
        """Return the messages of a turn as JSON; equal blocks give equal text."""
        turn = self.turns[number]
        size = self.block_tokens * BYTES_PER_TOKEN
        names = turn.blocks[: -(-turn.prompt_tokens // self.block_tokens)]
        tokens = b"".join([(b"%016x" % name * -(-size // 16))[:size] for name in names])
        messages = list[bytes]()
        first = 0
        for end in self._message_ends(number):
            role = b"assistant" if len(messages) % 2 else b"user"
            content = tokens[first * BYTES_PER_TOKEN : end * BYTES_PER_TOKEN]
            messages.append(b'{"role":"%s","content":"%s"}' % (role, content))
            first = end
        return b"[" + b",".join(messages) + b"]"

    def ids(self, number: int) -> bytes:
        """Return the prompt of a turn as JSON of token ids, of BYTES_PER_TOKEN bytes each."""
        turn = self.turns[number]
        size = self.block_tokens
        names = turn.blocks[: -(-turn.prompt_tokens // size)]
        ids = [token for name in names for token in token_ids(name, size)][: turn.prompt_tokens]
        return b"[%s]" % ",".join(map(str, ids)).encode()

    def _message_ends(self, number: int) -> Sequence[int]:
        """Return where the prompt's messages end, in tokens."""
        ends = [self.turns[number].prompt_tokens]
        while (before := self.turns[number].goes_on) is not None:
            number = before
            turn = self.turns[before]
            ends += turn.prompt_tokens + turn.output_tokens, turn.prompt_tokens
        return ends[::-1]


@dataclass(frozen=True, slots=True)
class Conversations:
    """What generated conversations are like.

    Lengths and times are exponentially distributed around their means.
    """

    sessions: int
    turns: int
    per_s: float  # conversations that begin in a second (Poisson)
    think_s: float  # from the end of an answer to the next turn
    system_tokens: int  # at the beginning of each conversation, the same in all of them
    prompt_tokens: float  # that a turn adds
    output_tokens: float

    def generate(self, block_tokens: int, seed: int) -> Trace:
        """Return the same trace for the same seed."""
        chance = Random(seed)
        names = BlockNames(self.system_tokens // block_tokens)
        shared = list(range(self.system_tokens // block_tokens))
        turns = list[Turn]()
        begins = 0.0
        for session in range(self.sessions):
            begins += chance.expovariate(self.per_s)
            lengths = list[tuple[int, int]]()
            total = self.system_tokens
            for _ in range(self.turns):
                prompt = total + 1 + int(chance.expovariate(1 / self.prompt_tokens))
                output = 1 + int(chance.expovariate(1 / self.output_tokens))
                lengths.append((prompt, output))
                total = prompt + output
            own = names.new_names(-(-total // block_tokens) - len(shared))
            blocks = [*shared, *own]
            for number, (prompt, output) in enumerate(lengths):
                at_s = chance.expovariate(1 / self.think_s) if number and self.think_s else 0.0
                goes_on = len(turns) - 1 if number else None
                at_s = at_s if number else begins
                turns.append(
                    Turn(f"s{session}", blocks, prompt, output, at_s, goes_on, waits=number > 0)
                )
        return Trace(block_tokens, turns)


@dataclass(frozen=True, slots=True)
class Phase:
    """A time of one kind of traffic.

    Lengths are exponentially distributed around their means.
    """

    seconds: float
    per_s: float  # requests in a second, independent of each other (Poisson)
    prompt_tokens: float
    output_tokens: float


def phased_trace(phases: Sequence[Phase], block_tokens: int, seed: int) -> Trace:
    """Return a trace of phases that follow each other; no two prompts share a block.

    The same seed, the same trace.
    """
    chance = Random(seed)
    names = BlockNames(0)
    turns = list[Turn]()
    begin = 0.0
    for phase in phases:
        now = begin + chance.expovariate(phase.per_s)
        end = begin + phase.seconds
        while now < end:
            prompt = 1 + int(chance.expovariate(1 / phase.prompt_tokens))
            output = 1 + int(chance.expovariate(1 / phase.output_tokens))
            blocks = names.new_names(-(-(prompt + output) // block_tokens))
            turns.append(Turn(f"r{len(turns)}", blocks, prompt, output, now))
            now += chance.expovariate(phase.per_s)
        begin = end
    return Trace(block_tokens, turns)


@dataclass(slots=True)
class BlockNames:
    """Makes new names of blocks."""

    first: int

    def new_names(self, count: int) -> range:
        """Return so many names."""
        names = range(self.first, self.first + count)
        self.first += count
        return names


def poisson(per_s: float, seed: int) -> Iterator[float]:
    """Yield times of independent arrivals."""
    chance = Random(seed)
    now = 0.0
    while True:
        now += chance.expovariate(per_s)
        yield now
