"""What an engine answers, read at the border and compared: texts and tokens exactly, logprobs but
for rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from pdrelay_tools.proving.core.finding import FindingName

SMALLEST_TOLERANCE: Final = 1e-4  # of a logprob: float32 differs by this in the order of its sums
_SHOWN: Final = 60  # characters of a text in a finding
_SHOWN_ERROR: Final = 300  # characters of an error


class Malformed(Exception):
    """An answer is not in OpenAI's shape; the message says where."""


class _TopLogprob(msgspec.Struct):
    token: str
    logprob: float


class _TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_TopLogprob] = []


class _AnyLogprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None  # of chats
    tokens: list[str] | None = None  # of completions, as the following two
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _ToolFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    function: _ToolFunction | None = None


class _ToldMessage(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _ToldChoice(msgspec.Struct):
    index: int
    text: str | None = None
    message: _ToldMessage | None = None
    delta: _ToldMessage | None = None
    logprobs: _AnyLogprobs | None = None
    finish_reason: str | None = None


class _ToldCounts(msgspec.Struct):
    prompt_tokens: int | None
    completion_tokens: int | None = None


class _ToldError(msgspec.Struct):
    message: str = ""


class _ToldPart(msgspec.Struct):
    """A whole answer, or an event of a stream."""

    choices: list[_ToldChoice] = []
    usage: _ToldCounts | None = None
    error: _ToldError | str | None = None


_PARTS: Final = msgspec.json.Decoder(_ToldPart)


@dataclass(frozen=True, slots=True)
class OneAnswer:
    """One choice: its text, each token with its logprob, and the likeliest tokens at its place with
    theirs.
    """

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    others: tuple[tuple[tuple[str, float], ...], ...]
    finish: str | None
    tools: str  # names and arguments of the tool calls


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    choices: tuple[OneAnswer, ...]
    prompt_tokens: int | None
    completion_tokens: int | None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text if self.choices else ""


class _Choice:
    """A choice, as its parts arrive."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tools: list[str] = []
        self.tokens: list[str] = []
        self.logprobs: list[float] = []
        self.others: list[tuple[tuple[str, float], ...]] = []
        self.finish: str | None = None

    def take(self, part: _ToldChoice) -> None:
        message = part.message or part.delta
        self.text += [part.text or "", (message.content or "") if message else ""]
        for call in (message.tool_calls or ()) if message else ():
            if call.function is not None:
                self.tools += [call.function.name or "", call.function.arguments or ""]
        self.finish = part.finish_reason or self.finish
        if (found := part.logprobs) is None:
            return
        for item in found.content or ():
            self.tokens.append(item.token)
            self.logprobs.append(item.logprob)
            self.others.append(_sorted({top.token: top.logprob for top in item.top_logprobs}))
        self.tokens += found.tokens or ()
        self.logprobs += [0.0 if value is None else value for value in found.token_logprobs or ()]
        self.others += [_sorted(top or {}) for top in found.top_logprobs or ()]

    def done(self) -> OneAnswer:
        return OneAnswer(
            "".join(self.text),
            tuple(self.tokens),
            tuple(self.logprobs),
            tuple(self.others),
            self.finish,
            "".join(self.tools),
        )


def read(parts: Sequence[bytes]) -> Answer:
    """Read a whole answer (one part), or the events of a stream.

    Raises:
        Malformed: a part is not in OpenAI's shape, is an error, or a choice has no end.
    """
    choices: dict[int, _Choice] = {}
    counts: _ToldCounts | None = None
    for raw in parts:
        try:
            part = _PARTS.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise Malformed(f"{exc}") from exc
        if part.error is not None:
            said = part.error if isinstance(part.error, str) else part.error.message
            raise Malformed(f"an error in the answer: {said[:_SHOWN_ERROR]}")
        counts = part.usage or counts
        for choice in part.choices:
            choices.setdefault(choice.index, _Choice()).take(choice)
    if not choices:
        raise Malformed("no choice in it")
    made = tuple(choices[index].done() for index in sorted(choices))
    if any(one.finish is None for one in made):
        raise Malformed("a choice has no finish_reason")
    counts = counts or _ToldCounts(None)
    return Answer(made, counts.prompt_tokens, counts.completion_tokens)


def _sorted(top: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(top.items(), key=lambda item: (-item[1], item[0])))


def events_of(body: bytes) -> tuple[list[bytes], bool]:
    """Return the data of server-sent events, and whether the stream ended with [DONE]."""
    data = [line[5:].strip() for line in body.splitlines() if line.startswith(b"data:")]
    is_done = bool(data) and data[-1] == b"[DONE]"
    return [each for each in data if each != b"[DONE]"], is_done


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which two answers differ."""

    name: FindingName
    seen: str


def differences(ours: Answer, reference: Answer, tolerance: float) -> list[Difference]:
    """Compare an answer with the reference's.

    Where the reference itself had two tokens within the tolerance, either of them is right, and
    what follows the other one is not compared.
    """
    if len(ours.choices) != len(reference.choices):
        return [
            Difference(
                FindingName.WRONG_TEXT, f"{len(ours.choices)} choices, not {len(reference.choices)}"
            )
        ]
    found: list[Difference] = []
    for one, other in zip(ours.choices, reference.choices, strict=True):
        found += _of_choice(one, other, tolerance)
    have_same_end = all(map(_has_same_end, ours.choices, reference.choices))  # else there was a tie
    if have_same_end and ours.completion_tokens != reference.completion_tokens:
        said = f"{ours.completion_tokens} tokens in the answer, not {reference.completion_tokens}"
        found.append(Difference(FindingName.WRONG_USAGE, said))
    if ours.prompt_tokens != reference.prompt_tokens:
        said = f"{ours.prompt_tokens} prompt tokens, not {reference.prompt_tokens}"
        found.append(Difference(FindingName.WRONG_USAGE, said))
    return found


def _has_same_end(ours: OneAnswer, reference: OneAnswer) -> bool:
    return (ours.text, ours.tools, ours.tokens) == (
        reference.text,
        reference.tools,
        reference.tokens,
    )


def _of_choice(ours: OneAnswer, reference: OneAnswer, tolerance: float) -> list[Difference]:
    same = _same_tokens(ours, reference)
    if ours.tokens and reference.tokens and same < max(len(ours.tokens), len(reference.tokens)):
        if _is_tie(ours, reference, same, tolerance):
            return _of_logprobs(ours, reference, same, tolerance)
        at = f"token {same + 1} is {_at(ours, same)}, not {_at(reference, same)}"
        return [Difference(FindingName.WRONG_TEXT, at)]
    if (ours.text, ours.tools, ours.finish) != (reference.text, reference.tools, reference.finish):
        shown = " / ".join(
            _shown(f"{one.text}{one.tools} ({one.finish})") for one in (ours, reference)
        )
        return [Difference(FindingName.WRONG_TEXT, f"answer and reference: {shown}")]
    if bool(ours.logprobs) != bool(reference.logprobs):
        has = "has none" if reference.logprobs else "has some, the reference has none"
        return [Difference(FindingName.WRONG_LOGPROBS, f"logprobs: the answer {has}")]
    return _of_logprobs(ours, reference, same, tolerance)


def _same_tokens(ours: OneAnswer, reference: OneAnswer) -> int:
    pairs = zip(ours.tokens, reference.tokens, strict=False)
    return next(
        (place for place, (one, other) in enumerate(pairs) if one != other),
        min(map(len, (ours.tokens, reference.tokens))),
    )


def _is_tie(ours: OneAnswer, reference: OneAnswer, place: int, tolerance: float) -> bool:
    if place >= min(len(ours.tokens), len(reference.tokens)) or place >= len(reference.others):
        return False
    likely = dict(reference.others[place])
    theirs = likely.get(reference.tokens[place])
    mine = likely.get(ours.tokens[place])
    return theirs is not None and mine is not None and abs(theirs - mine) <= 2 * tolerance


def _of_logprobs(
    ours: OneAnswer, reference: OneAnswer, count: int, tolerance: float
) -> list[Difference]:
    worst, place = largest_gap(ours, reference, count)
    if worst <= tolerance:
        return []
    said = (
        f"the logprob of token {place + 1} differs by {worst:.2g}; the reference differs from "
        f"itself by {tolerance:.2g}"
    )
    return [Difference(FindingName.WRONG_LOGPROBS, said)]


def largest_gap(ours: OneAnswer, reference: OneAnswer, count: int) -> tuple[float, int]:
    """Return by how much logprobs of the first ``count`` tokens differ at most, and at which of
    them.

    Those of the likeliest others at a place count as well, if both answers have them.
    """
    gaps = [
        (abs(one - other), place)
        for place, (one, other) in enumerate(
            zip(ours.logprobs[:count], reference.logprobs[:count], strict=False)
        )
    ]
    for place, (mine, theirs) in enumerate(
        zip(ours.others[:count], reference.others[:count], strict=False)
    ):
        known = dict(theirs)
        gaps += [(abs(logprob - known[token]), place) for token, logprob in mine if token in known]
    return max(gaps, default=(0.0, 0))


def self_difference(one: Answer, again: Answer) -> float:
    """Return by how much two answers of one engine differ in the logprobs of their common
    beginning.
    """
    pairs = zip(one.choices, again.choices, strict=False)
    return max(
        (largest_gap(first, second, _same_tokens(first, second))[0] for first, second in pairs),
        default=0.0,
    )


def _at(answer: OneAnswer, place: int) -> str:
    return repr(_shown(answer.tokens[place])) if place < len(answer.tokens) else "missing"


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
