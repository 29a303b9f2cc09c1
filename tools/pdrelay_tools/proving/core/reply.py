"""The faults of the reply to one request."""

from collections.abc import Sequence
from typing import Final

from pdrelay_tools.http_reply import Reply
from pdrelay_tools.proving.core.answer import Answer, Malformed, differences, events_of, read
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.question import Question

_EXAMPLES: Final = 2  # in a finding


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
    """Judge a reply; ``reference``: the right answer, if known; ``may_fail``: errors are fine."""
    if reply.is_late:
        return [Finding(FindingName.NO_ANSWER, f"{question}: {reply.reason}")]
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
        Finding(difference.name, f"{question}: {difference.evidence}")
        for difference in differences(answer, reference, tolerance)
    ]


def is_uncompared(question: Question, reply: Reply, reference: Answer | None) -> bool:
    """Tell whether a reply is an answer for which the reference has none."""
    if reference is not None:
        return False
    try:
        return bool(read_reply(question, reply).choices)
    except Malformed:
        return False


def together(findings: Sequence[Finding], requests: int) -> list[Finding]:
    """Merge findings of one name into one: their number of ``requests``, and the first of them."""
    names = dict.fromkeys(finding.name for finding in findings)
    merged: list[Finding] = []
    for name in names:
        of_name = [finding.evidence for finding in findings if finding.name is name]
        shown = "; ".join(of_name[:_EXAMPLES]) + ("; ..." if len(of_name) > _EXAMPLES else "")
        merged.append(
            Finding(name, f"{len(of_name)} of {requests}: {shown}" if requests > 1 else shown)
        )
    return merged
