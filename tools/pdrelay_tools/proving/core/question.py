"""The requests of the suite: their bodies, and where prompts that no cache has come from."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias

Json: TypeAlias = dict[str, Any]

WORDS: Final = (
    *(
        "river",
        "stone",
        "lantern",
        "north",
        "cloud",
        "window",
        "copper",
        "garden",
        "seven",
        "letter",
        "morning",
    ),
    *(
        "paper",
        "engine",
        "bridge",
        "silver",
        "valley",
        "winter",
        "candle",
        "harbor",
        "mirror",
        "quiet",
        "signal",
    ),
)
# token ids that every vocabulary has
_FIRST_ID = 20
_LAST_ID = 490
TOKENS: Final = 16  # of an answer, where nothing else is said


class Dice(Protocol):
    """What the suite needs of a source of random numbers."""

    def randrange(self, start: int, stop: int) -> int:
        """Return a number from ``start`` on, below ``stop``."""
        ...


class Shape(StrEnum):
    """Which API a question goes to, and how its prompt is written."""

    TEXT = "text"  # /v1/completions
    IDS = "ids"  # the same, with token ids
    CHAT = "chat"  # /v1/chat/completions


@dataclass(frozen=True, slots=True)
class Question:
    """One request; ``fields`` are further fields of its body."""

    shape: Shape
    prompt: str | tuple[int, ...] | tuple[Json, ...]
    stream: bool = False
    max_tokens: int = TOKENS
    fields: Mapping[str, object] = field(default_factory=dict[str, object])
    model: str | None = None  # None: the one that the engines serve
    logprobs: bool = True

    @property
    def path(self) -> str:
        """Where it is posted."""
        return "/v1/chat/completions" if self.shape is Shape.CHAT else "/v1/completions"

    def __str__(self) -> str:
        """Name it without its prompt."""
        size = f"{len(self.prompt)} {'tokens' if self.shape is Shape.IDS else 'characters'}"
        return f"{'streamed' if self.stream else 'whole'} {self.shape}, {size}"

    def body(self, model: str) -> Json:
        """Return the body of the request."""
        made: Json = {"model": self.model or model, "max_tokens": self.max_tokens, "temperature": 0}
        if self.shape is Shape.CHAT:
            said: object = self.prompt
            made["messages"] = (
                [{"role": "user", "content": said}] if isinstance(said, str) else list(self.prompt)
            )
        else:
            made["prompt"] = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        if self.logprobs:
            made |= (
                {"logprobs": True, "top_logprobs": 2}
                if self.shape is Shape.CHAT
                else {"logprobs": 2}
            )
        if self.stream:
            made |= {"stream": True, "stream_options": {"include_usage": True}}
        return made | dict(self.fields)


class Prompts:
    """Prompts that share no block with each other: each begins with a number of its own."""

    def __init__(self, dice: Dice) -> None:
        self._dice = dice
        self._numbers = itertools.count(dice.randrange(0, 10**6))

    def ids(self, length: int) -> tuple[int, ...]:
        """Return so many token ids."""
        return tuple(self._dice.randrange(_FIRST_ID, _LAST_ID) for _ in range(length))

    def text(self, words: int) -> str:
        """Return so many words, and a number before them."""
        found = [WORDS[self._dice.randrange(0, len(WORDS))] for _ in range(words)]
        return f"{next(self._numbers)} {' '.join(found)}"

    def mixed(self, count: int, *, longest: int) -> list[Question]:
        """Return questions of every shape, streamed and whole, from short to ``longest`` tokens; a
        fifth share most.

        Lengths grow by a constant factor, so that short ones are as frequent as long ones.
        """
        made: list[Question] = []
        for number in range(count):
            length = max(2, round(8 * (longest / 8) ** (number / max(1, count - 1))))
            shape = tuple(Shape)[number % 3]
            prompt = self.ids(length) if shape is Shape.IDS else self.text(max(2, length // 5))
            if number % 5 == 4 and (shared := _same_shape(made, shape)) is not None:
                prompt = _continued(shared, prompt)
            made.append(Question(shape, prompt, stream=number % 2 == 1))
        return made


def _same_shape(made: Sequence[Question], shape: Shape) -> str | tuple[int, ...] | None:
    for question in reversed(made):
        if question.shape is shape and isinstance(question.prompt, str):
            return question.prompt
        if question.shape is shape and shape is Shape.IDS:
            return tuple(token for token in question.prompt if isinstance(token, int))
    return None


def _continued(shared: str | tuple[int, ...], more: str | tuple[int, ...]) -> str | tuple[int, ...]:
    """Begin a prompt with two thirds of an earlier one; a third of the new one follows."""
    if isinstance(shared, str) and isinstance(more, str):
        return shared[: len(shared) * 2 // 3] + " " + more[: len(more) // 3]
    kept = tuple(token for token in shared if isinstance(token, int))
    new = tuple(token for token in more if isinstance(token, int))
    return kept[: len(kept) * 2 // 3] + new[: max(1, len(new) // 3)]
