"""Parses answers and compares them: texts and tokens exactly, logprobs within a tolerance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from pdrelay_tools.proving.core.finding import FindingName

SMALLEST_TOLERANCE: Final = 1e-4  # of a logprob: what another order of float32 sums changes
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


class _PartMessage(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _PartChoice(msgspec.Struct):
    index: int
    text: str | None = None
    message: _PartMessage | None = None
    delta: _PartMessage | None = None
    logprobs: _AnyLogprobs | None = None
    finish_reason: str | None = None


class _PartUsage(msgspec.Struct):
    prompt_tokens: int | None
    completion_tokens: int | None = None


class _PartError(msgspec.Struct):
    message: str = ""


class _AnswerPart(msgspec.Struct):
    """A whole answer, or an event of a stream."""

    choices: list[_PartChoice] = []
    usage: _PartUsage | None = None
    error: _PartError | str | None = None


_PARTS: Final = msgspec.json.Decoder(_AnswerPart)


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """One choice: its text, its tokens with logprobs, and the top logprobs of each place."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[str, float], ...], ...]
    finish: str | None
    tools: str  # names and arguments of the tool calls


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    choices: tuple[ChoiceAnswer, ...]
    prompt_tokens: int | None
    completion_tokens: int | None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text if self.choices else ""


class _ChoiceParts:
    """Collects the parts of a choice."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tools: list[str] = []
        self.tokens: list[str] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[tuple[tuple[str, float], ...]] = []
        self.finish: str | None = None

    def add_part(self, part: _PartChoice) -> None:
        message = part.message or part.delta
        self.text += [part.text or "", (message.content or "") if message else ""]
        for call in (message.tool_calls or ()) if message else ():
            if call.function is not None:
                self.tools += [call.function.name or "", call.function.arguments or ""]
        self.finish = part.finish_reason or self.finish
        if (logprobs := part.logprobs) is None:
            return
        for item in logprobs.content or ():
            self.tokens.append(item.token)
            self.logprobs.append(item.logprob)
            self.top_logprobs.append(_sorted({top.token: top.logprob for top in item.top_logprobs}))
        self.tokens += logprobs.tokens or ()
        self.logprobs += [
            0.0 if value is None else value for value in logprobs.token_logprobs or ()
        ]
        self.top_logprobs += [_sorted(top or {}) for top in logprobs.top_logprobs or ()]

    def done(self) -> ChoiceAnswer:
        return ChoiceAnswer(
            "".join(self.text),
            tuple(self.tokens),
            tuple(self.logprobs),
            tuple(self.top_logprobs),
            self.finish,
            "".join(self.tools),
        )


def read(parts: Sequence[bytes]) -> Answer:
    """Read a whole answer (one part), or the events of a stream.

    Raises:
        Malformed: a part is not in OpenAI's shape, is an error, or a choice has no end.
    """
    choices: dict[int, _ChoiceParts] = {}
    counts: _PartUsage | None = None
    for raw in parts:
        try:
            part = _PARTS.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise Malformed(f"{exc}") from exc
        if part.error is not None:
            message = part.error if isinstance(part.error, str) else part.error.message
            raise Malformed(f"an error in the answer: {message[:_SHOWN_ERROR]}")
        counts = part.usage or counts
        for choice in part.choices:
            choices.setdefault(choice.index, _ChoiceParts()).add_part(choice)
    if not choices:
        raise Malformed("no choice in it")
    answers = tuple(choices[index].done() for index in sorted(choices))
    if any(answer.finish is None for answer in answers):
        raise Malformed("a choice has no finish_reason")
    counts = counts or _PartUsage(None)
    return Answer(answers, counts.prompt_tokens, counts.completion_tokens)


def _sorted(top: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(top.items(), key=lambda item: (-item[1], item[0])))


def events_of(body: bytes) -> tuple[list[bytes], bool]:
    """Return the data of server-sent events, and whether the stream ended with [DONE]."""
    data = [line[5:].strip() for line in body.splitlines() if line.startswith(b"data:")]
    is_done = bool(data) and data[-1] == b"[DONE]"
    return [payload for payload in data if payload != b"[DONE]"], is_done


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which two answers differ."""

    name: FindingName
    evidence: str


def differences(ours: Answer, reference: Answer, tolerance: float) -> list[Difference]:
    """Compare an answer with the reference's.

    Where the reference has two tokens within the tolerance (a tie), either of them is right, and
    the texts are not compared from there on.
    """
    if len(ours.choices) != len(reference.choices):
        return [
            Difference(
                FindingName.WRONG_TEXT, f"{len(ours.choices)} choices, not {len(reference.choices)}"
            )
        ]
    differing: list[Difference] = []
    for choice, right_choice in zip(ours.choices, reference.choices, strict=True):
        differing += _choice_differences(choice, right_choice, tolerance)
    have_same_end = all(map(_has_same_end, ours.choices, reference.choices))  # else there was a tie
    if have_same_end and ours.completion_tokens != reference.completion_tokens:
        evidence = (
            f"{ours.completion_tokens} tokens in the answer, not {reference.completion_tokens}"
        )
        differing.append(Difference(FindingName.WRONG_USAGE, evidence))
    if ours.prompt_tokens != reference.prompt_tokens:
        evidence = f"{ours.prompt_tokens} prompt tokens, not {reference.prompt_tokens}"
        differing.append(Difference(FindingName.WRONG_USAGE, evidence))
    return differing


def _has_same_end(ours: ChoiceAnswer, reference: ChoiceAnswer) -> bool:
    return (ours.text, ours.tools, ours.tokens) == (
        reference.text,
        reference.tools,
        reference.tokens,
    )


def _choice_differences(
    ours: ChoiceAnswer, reference: ChoiceAnswer, tolerance: float
) -> list[Difference]:
    same = _same_tokens(ours, reference)
    if ours.tokens and reference.tokens and same < max(len(ours.tokens), len(reference.tokens)):
        if _is_tie(ours, reference, same, tolerance):
            return _logprob_differences(ours, reference, same, tolerance)
        at = f"token {same + 1} is {_at(ours, same)}, not {_at(reference, same)}"
        return [Difference(FindingName.WRONG_TEXT, at)]
    if (ours.text, ours.tools, ours.finish) != (reference.text, reference.tools, reference.finish):
        shown = " / ".join(
            _shown(f"{answer.text}{answer.tools} ({answer.finish})") for answer in (ours, reference)
        )
        return [Difference(FindingName.WRONG_TEXT, f"answer and reference: {shown}")]
    if bool(ours.logprobs) != bool(reference.logprobs):
        has = "has none" if reference.logprobs else "has some, the reference has none"
        return [Difference(FindingName.WRONG_LOGPROBS, f"logprobs: the answer {has}")]
    return _logprob_differences(ours, reference, same, tolerance)


def _same_tokens(ours: ChoiceAnswer, reference: ChoiceAnswer) -> int:
    pairs = zip(ours.tokens, reference.tokens, strict=False)
    return next(
        (place for place, (token, right_token) in enumerate(pairs) if token != right_token),
        min(map(len, (ours.tokens, reference.tokens))),
    )


def _is_tie(ours: ChoiceAnswer, reference: ChoiceAnswer, place: int, tolerance: float) -> bool:
    if place >= min(len(ours.tokens), len(reference.tokens)) or place >= len(
        reference.top_logprobs
    ):
        return False
    likely = dict(reference.top_logprobs[place])
    theirs = likely.get(reference.tokens[place])
    mine = likely.get(ours.tokens[place])
    return theirs is not None and mine is not None and abs(theirs - mine) <= 2 * tolerance


def _logprob_differences(
    ours: ChoiceAnswer, reference: ChoiceAnswer, count: int, tolerance: float
) -> list[Difference]:
    worst, place = largest_gap(ours, reference, count)
    if worst <= tolerance:
        return []
    evidence = (
        f"the logprob of token {place + 1} differs by {worst:.2g}; the reference differs from "
        f"itself by {tolerance:.2g}"
    )
    return [Difference(FindingName.WRONG_LOGPROBS, evidence)]


def largest_gap(ours: ChoiceAnswer, reference: ChoiceAnswer, count: int) -> tuple[float, int]:
    """Return the largest difference of logprobs in the first ``count`` tokens, and its place.

    The top logprobs of a place count as well, for tokens that both answers list.
    """
    gaps = [
        (abs(own_logprob - right_logprob), place)
        for place, (own_logprob, right_logprob) in enumerate(
            zip(ours.logprobs[:count], reference.logprobs[:count], strict=False)
        )
    ]
    for place, (mine, theirs) in enumerate(
        zip(ours.top_logprobs[:count], reference.top_logprobs[:count], strict=False)
    ):
        right_logprobs = dict(theirs)
        gaps += [
            (abs(logprob - right_logprobs[token]), place)
            for token, logprob in mine
            if token in right_logprobs
        ]
    return max(gaps, default=(0.0, 0))


def self_difference(answer: Answer, again: Answer) -> float:
    """Return by how much two answers of one engine differ, in logprobs of their common tokens."""
    pairs = zip(answer.choices, again.choices, strict=False)
    return max(
        (largest_gap(first, second, _same_tokens(first, second))[0] for first, second in pairs),
        default=0.0,
    )


def _at(answer: ChoiceAnswer, place: int) -> str:
    return repr(_shown(answer.tokens[place])) if place < len(answer.tokens) else "missing"


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
