"""How urgent a request is."""

import msgspec
import pytest

from xpyd_proxy.core.urgency import priority_of


@pytest.mark.parametrize(
    ("header", "body", "priority"),
    [
        (None, None, 0),
        (None, "3", 3),
        (None, "-3", -3),
        ("-1", "3", -1),  # the header wins, as in vLLM
        (" 7 ", None, 7),
        ("high", "3", 3),
        ("1.5", None, 0),
        ("", "2", 2),
        (None, '"2"', 0),
        (None, "2.5", 0),
        (None, "null", 0),
        (None, "[1]", 0),
        ("9" * 5000, None, 0),
    ],
)
def test_priorities_are_read_as_vllm_reads_them(header, body, priority):
    """A value that says nothing is nobody's mistake here: the engine refuses it if it wants to."""
    headers = () if header is None else ((b"x-vllm-priority", header.encode()),)
    fields = {} if body is None else {"priority": msgspec.Raw(body.encode())}

    assert priority_of(headers, fields) == priority
