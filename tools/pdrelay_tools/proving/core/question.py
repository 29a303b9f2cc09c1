"""The requests of the suite, and a generator of prompts that no cache has."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias

Json: TypeAlias = dict[str, Any]

WORDS: Final = (
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
)
# token ids that every vocabulary has
_FIRST_ID = 20
_LAST_ID = 490
TOKENS: Final = 16  # of an answer, by default


class Dice(Protocol):
    """A source of random numbers, such as random.Random."""

    def randrange(self, start: int, stop: int) -> int:
        """Return a number from ``start`` on, below ``stop``."""
        ...


class Shape(StrEnum):
    """The API of a question, and the form of its prompt."""

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
        """Describe it without its prompt, for findings."""
        size = f"{len(self.prompt)} {'tokens' if self.shape is Shape.IDS else 'characters'}"
        return f"{'streamed' if self.stream else 'whole'} {self.shape}, {size}"

    def body(self, model: str) -> Json:
        """Return the body of the request."""
        request: Json = {
            "model": self.model or model,
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        if self.shape is Shape.CHAT:
            prompt: object = self.prompt
            request["messages"] = (
                [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else list(self.prompt)
            )
        else:
            request["prompt"] = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        if self.logprobs:
            request |= (
                {"logprobs": True, "top_logprobs": 2}
                if self.shape is Shape.CHAT
                else {"logprobs": 2}
            )
        if self.stream:
            request |= {"stream": True, "stream_options": {"include_usage": True}}
        return request | dict(self.fields)


class Prompts:
    """Generates prompts that share no block: each text begins with a new number."""

    def __init__(self, dice: Dice) -> None:
        self._dice = dice
        self._numbers = itertools.count(dice.randrange(0, 10**6))

    def ids(self, length: int) -> tuple[int, ...]:
        """Return so many token ids."""
        return tuple(self._dice.randrange(_FIRST_ID, _LAST_ID) for _ in range(length))

    def text(self, words: int) -> str:
        """Return so many words, and a number before them."""
        chosen = [WORDS[self._dice.randrange(0, len(WORDS))] for _ in range(words)]
        return f"{next(self._numbers)} {' '.join(chosen)}"

    def mixed(self, count: int, *, longest: int) -> list[Question]:
        """Return questions of every shape, streamed and whole, of up to ``longest`` tokens.

        Lengths grow by a constant factor, so that short ones are as frequent as long ones. Each
        fifth question begins like an earlier one.
        """
        questions: list[Question] = []
        for number in range(count):
            length = max(2, round(8 * (longest / 8) ** (number / max(1, count - 1))))
            shape = tuple(Shape)[number % 3]
            prompt = self.ids(length) if shape is Shape.IDS else self.text(max(2, length // 5))
            if number % 5 == 4 and (shared := _same_shape(questions, shape)) is not None:
                prompt = _continued(shared, prompt)
            questions.append(Question(shape, prompt, stream=number % 2 == 1))
        return questions


def _same_shape(questions: Sequence[Question], shape: Shape) -> str | tuple[int, ...] | None:
    for question in reversed(questions):
        if question.shape is shape and isinstance(question.prompt, str):
            return question.prompt
        if question.shape is shape and shape is Shape.IDS:
            return tuple(token for token in question.prompt if isinstance(token, int))
    return None


def _continued(shared: str | tuple[int, ...], more: str | tuple[int, ...]) -> str | tuple[int, ...]:
    """Begin a prompt with two thirds of an earlier one; a third of the new one follows."""
    if isinstance(shared, str) and isinstance(more, str):
        return shared[: len(shared) * 2 // 3] + " " + more[: len(more) // 3]
    shared_ids = tuple(token for token in shared if isinstance(token, int))
    new_ids = tuple(token for token in more if isinstance(token, int))
    return shared_ids[: len(shared_ids) * 2 // 3] + new_ids[: max(1, len(new_ids) // 3)]
