"""What came of one request, and what is wrong with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdrelay_tools.proving.core.answer import Answer, Malformed, differences, events_of, read
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.question import Question

_SHOWN: Final = 120  # characters of an error
_EXAMPLES: Final = 2  # in a finding


@dataclass(frozen=True, slots=True)
class Reply:
    """One request and its response, as it came; times are those of one monotonic clock, in
    seconds.
    """

    status: int | None  # None: no response, see `why`
    body: bytes
    why: str  # the response did not come, or ended before its end
    is_late: bool  # ... because it took too long
    sent_at: float
    seconds: float
    event_times: tuple[float, ...] = ()  # when each event of a stream came

    @property
    def is_refusal(self) -> bool:
        """Whether the server has said that it does not serve this: not a time out, and not a
        server's error.
        """
        return (
            self.status is not None
            and not self.is_late
            and (self.status < 500 or self.status == 501)
        )

    def failure(self) -> str:
        """Say what was answered in place of an answer; empty: it is a success."""
        if self.why:
            return self.why
        if self.status == 200:
            return ""
        return f"HTTP {self.status}: {self.body[:_SHOWN].decode(errors='replace')}"


def read_reply(question: Question, reply: Reply) -> Answer:
    """Read the answer of a successful reply; raises Malformed."""
    if reply.failure():
        raise Malformed(reply.failure())
    if not question.stream:
        return read([reply.body])
    events, is_done = events_of(reply.body)
    if not is_done:
        raise Malformed("the stream ended without [DONE]")
    return read(events)


def findings_of(
    question: Question,
    reply: Reply,
    reference: Answer | None,
    tolerance: float,
    *,
    may_fail: bool = False,
) -> list[Finding]:
    """Judge a reply; ``reference``: the right answer, if it is known; ``may_fail``: an error is as
    good.
    """
    if reply.is_late:
        return [Finding(FindingName.NO_ANSWER, f"{question}: {reply.why}")]
    if reply.failure():
        return (
            []
            if may_fail
            else [Finding(FindingName.REQUEST_FAILED, f"{question}: {reply.failure()}")]
        )
    try:
        answer = read_reply(question, reply)
    except Malformed as exc:
        return [] if may_fail else [Finding(FindingName.MALFORMED_ANSWER, f"{question}: {exc}")]
    if may_fail and any(choice.finish in ("error", "abort") for choice in answer.choices):
        return []
    if reference is None:
        return []
    return [
        Finding(each.name, f"{question}: {each.seen}")
        for each in differences(answer, reference, tolerance)
    ]


def is_uncompared(question: Question, reply: Reply, reference: Answer | None) -> bool:
    """Tell whether a reply is an answer, and no reference's is there that would show whether it is
    right.
    """
    if reference is not None:
        return False
    try:
        return bool(read_reply(question, reply).choices)
    except Malformed:
        return False


def together(findings: Sequence[Finding], asked: int) -> list[Finding]:
    """Make one finding of all of one name: how many of those asked, and the first ones."""
    names = dict.fromkeys(finding.name for finding in findings)
    made: list[Finding] = []
    for name in names:
        of_name = [finding.seen for finding in findings if finding.name is name]
        shown = "; ".join(of_name[:_EXAMPLES]) + ("; ..." if len(of_name) > _EXAMPLES else "")
        made.append(Finding(name, f"{len(of_name)} of {asked}: {shown}" if asked > 1 else shown))
    return made
