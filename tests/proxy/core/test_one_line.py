"""Words of engines, pods and clients on one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.one_line import one_line


@pytest.mark.parametrize("text", ["", "0.32.0", "qwen/Qwen3-0.6B", "größer 模型", "a\\n"])
def test_words_stay_what_they_are(text):
    """Names are compared, and most are plain."""
    assert one_line(text) == text


@given(st.text())
def test_nothing_breaks_a_line_or_turns_it_round(text):
    """Whatever reads the line: a terminal, a log's collector, Python."""
    found = one_line(text)

    assert len(found.splitlines()) <= 1
    assert not set(found) & set("\x1b\x07\x85\u2028\u202e")
    found.encode()
