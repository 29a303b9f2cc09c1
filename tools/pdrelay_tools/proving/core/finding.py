"""Findings with stable names and their meanings, and how each check ended."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class FindingName(StrEnum):
    """The stable names of findings."""

    WRONG_TEXT = "wrong-text"
    WRONG_LOGPROBS = "wrong-logprobs"
    WRONG_USAGE = "wrong-usage"
    REQUEST_FAILED = "request-failed"
    NO_ANSWER = "no-answer"
    SLOW_ANSWER = "slow-answer"
    MALFORMED_ANSWER = "malformed-answer"
    BLOCKS_HELD = "blocks-held"
    BLOCKS_STRANDED = "blocks-stranded"
    BLOCKS_NEVER_FREED = "blocks-never-freed"
    BLOCKS_UNSEEN = "blocks-unseen"
    NOTHING_MOVED = "nothing-moved"
    BAD_INPUT_ACCEPTED = "bad-input-accepted"
    BAD_INPUT_ERROR = "bad-input-error"
    ENGINE_DOWN = "engine-down"


MEANINGS: Final[Mapping[FindingName, str]] = {
    FindingName.WRONG_TEXT: "An answer with HTTP 200 has another text than one engine gives. The decode engine computed"
    " from KV that is not the prompt's: blocks were read or written too late, from or to the wrong "
    "place.",
    FindingName.WRONG_LOGPROBS: "The text is right and the probabilities are not, by more than the reference differs"
    " from itself. Some of the KV that the decode engine used is wrong; other prompts will get "
    "another text.",
    FindingName.WRONG_USAGE: "The numbers of tokens differ from those of one engine: the prompt was cut, or counted"
    " twice.",
    FindingName.REQUEST_FAILED: "A request that one engine serves was answered with an error.",
    FindingName.NO_ANSWER: "A request got no answer in time: it hangs in an engine, and its client waits.",
    FindingName.SLOW_ANSWER: "A right answer took as long as a lease, and many times as long as the single engine's:"
    " its KV came only when the prefill engine gave the blocks up, or did not come and was "
    "computed again.",
    FindingName.MALFORMED_ANSWER: "An answer is not what the OpenAI API says: clients cannot read it.",
    FindingName.BLOCKS_HELD: "KV blocks stayed pinned after the last request had ended. Until they are free, other"
    " prompts have less room; with many such requests an engine stops.",
    FindingName.BLOCKS_STRANDED: "A prefill engine kept KV blocks of requests that were over until their lease ended:"
    " nothing told it that they were over. So each client that leaves, or each engine that dies, "
    "takes room from other"
    " prompts for a lease; with many of them the prefill engine stops.",
    FindingName.BLOCKS_NEVER_FREED: "KV blocks were still pinned when the suite stopped watching. Every such request"
    " makes the cache smaller until the engine is restarted.",
    FindingName.BLOCKS_UNSEEN: "An engine showed its KV blocks in its metrics at the beginning, and does not any more:"
    " whether it still holds some is not known.",
    FindingName.NOTHING_MOVED: "The decode engines loaded no KV: they computed the prompts again. Texts are right and"
    " the prefill engines' work is for nothing.",
    FindingName.BAD_INPUT_ACCEPTED: "A request that makes no sense was answered with a success.",
    FindingName.BAD_INPUT_ERROR: "A request that makes no sense was answered with a server's error, or not as the"
    " OpenAI API says: its client cannot tell that the fault is its own.",
    FindingName.ENGINE_DOWN: "An engine does not answer its health check any more, although nothing was done to its"
    " process.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its name, and the evidence with values ("seen" in reports)."""

    name: FindingName
    evidence: str

    @property
    def means(self) -> str:
        """The consequence, in a sentence or two."""
        return MEANINGS[self.name]


class CheckState(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # its needs are missing, or no time was left
    ABORTED = "aborted"  # it could not be done: a command failed, an engine cannot be reached


@dataclass(frozen=True, slots=True)
class CheckReport:
    """How one check ended, and what it measured."""

    name: str
    group: str
    about: str
    state: CheckState
    began_s: float  # since the run began
    seconds: float
    requests: int
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""  # of SKIPPED and ABORTED
    idle_s: float | None = None  # from its last request until no block was held; None: not known

    @property
    def details(self) -> str:
        """What a page says of it beside its numbers."""
        return "; ".join(filter(None, (self.reason, *self.notes)))
