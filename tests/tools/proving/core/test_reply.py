"""What came of a request becomes findings, each with what was seen."""

import json

import pytest

from pdrelay_tools.http_reply import Reply
from pdrelay_tools.proving.core.finding import MEANINGS, Finding, FindingName
from pdrelay_tools.proving.core.question import Question, Shape
from pdrelay_tools.proving.core.reply import findings_of, read_reply, together

ASKED = Question(Shape.TEXT, "where")
STREAMED = Question(Shape.TEXT, "where", stream=True)
PART = {"choices": [{"index": 0, "text": "here", "finish_reason": "stop"}]}
BODY = json.dumps(PART).encode()


def reply(status=200, body=BODY, why="", *, is_late=False):
    return Reply(status, body, why, is_late, 0.0, 1.0)


def names(question, found, reference=None, **options):
    return [finding.name for finding in findings_of(question, found, reference, 1e-4, **options)]


def test_a_success_without_a_reference_is_no_finding():
    assert names(ASKED, reply()) == []


def test_the_reference_decides():
    right = read_reply(ASKED, reply(body=BODY.replace(b"here", b"there")))

    assert names(ASKED, reply(), right) == [FindingName.WRONG_TEXT]


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (reply(500, b"oops"), FindingName.REQUEST_FAILED),
        (reply(None, b"", "connection refused"), FindingName.REQUEST_FAILED),
        (reply(200, b"", "d gave no whole answer within 60 s", is_late=True), FindingName.NO_ANSWER),
        (reply(200, b"<html>"), FindingName.MALFORMED_ANSWER),
    ],
)
def test_every_failure_has_its_name(found, name):
    assert names(ASKED, found) == [name]


def test_errors_may_be_right_and_hangs_never_are():
    """Of an engine that died, say: an error, but no silence."""
    assert names(ASKED, reply(502, b""), may_fail=True) == []
    assert names(ASKED, reply(200, b"", "late", is_late=True), may_fail=True) == [FindingName.NO_ANSWER]


def test_a_choice_that_ended_in_an_error_is_one():
    """vLLM's kv_load_failure_policy fail: status 200, finish_reason error."""
    failed = reply(body=BODY.replace(b"stop", b"error"))
    right = read_reply(ASKED, reply())

    assert names(ASKED, failed, right, may_fail=True) == []
    assert names(ASKED, failed, right) == [FindingName.WRONG_TEXT]


def test_a_stream_that_breaks_off_is_malformed():
    """Half of an answer is none."""
    event = b"data: " + BODY + b"\n\n"

    assert names(STREAMED, reply(body=event)) == [FindingName.MALFORMED_ANSWER]
    assert names(STREAMED, reply(body=event + b"data: [DONE]\n\n")) == []


def test_findings_of_one_name_become_one():
    """A page of twenty equal lines helps nobody."""
    wrong = [Finding(FindingName.WRONG_TEXT, f"prompt {number}") for number in range(9)]

    found = together([*wrong, Finding(FindingName.NO_ANSWER, "silence")], 20)

    assert [(each.name, each.evidence) for each in found] == [
        (FindingName.WRONG_TEXT, "9 of 20: prompt 0; prompt 1; ..."),
        (FindingName.NO_ANSWER, "1 of 20: silence"),
    ]


def test_every_name_has_a_meaning():
    assert set(MEANINGS) == set(FindingName)
