"""Progress that reads well on a terminal and in a log file."""

import io

from pdrelay_tools.local.screen import Screen


class Terminal(io.StringIO):
    def isatty(self):
        return True


def waits(screen, *seconds, names=("decode-0",)):
    for second in seconds:
        screen.waiting(names, second)


def test_a_pipe_gets_a_line_every_five_seconds():
    """A CI log of a slow start stays short, and a quick start has no such line at all."""
    out = io.StringIO()

    waits(Screen(out), 0.1, 4.9, 5.1, 7.0, 9.9, 10.2)

    assert out.getvalue() == "  wait        5 s for decode-0\n  wait       10 s for decode-0\n"


def test_a_terminal_rewrites_its_line():
    """And what is written next does not sit behind it."""
    out = Terminal()
    screen = Screen(out)

    waits(screen, 1, 2)
    screen.done_waiting()
    screen.line("ready")

    assert out.getvalue() == (
        "\r\x1b[K  wait        1 s for decode-0\r\x1b[K  wait        2 s for decode-0\r\x1b[Kready\n"
    )


def test_other_progress_has_a_label_of_its_own():
    """A download is no wait for engines."""
    out = Terminal()
    screen = Screen(out)

    screen.progress("model", "7 of 93 MB fetched", 1)
    screen.done_waiting()

    assert out.getvalue() == "\r\x1b[K  model     7 of 93 MB fetched\r\x1b[K"


def test_an_interrupted_wait_keeps_its_line():
    """It says what was waited for when somebody lost patience."""
    out = Terminal()
    screen = Screen(out)

    waits(screen, 1)
    screen.line("Interrupted.")

    assert out.getvalue().endswith("  wait        1 s for decode-0\nInterrupted.\n")


def test_a_line_that_would_wrap_is_cut(monkeypatch):
    """A terminal can only rewrite its last row."""
    monkeypatch.setenv("COLUMNS", "30")
    out = Terminal()

    waits(Screen(out), 1, names=("prefill-0", "decode-0", "decode-1"))

    assert out.getvalue() == "\r\x1b[K  wait        1 s for prefill"


def test_long_texts_form_a_column():
    """An answer has as many words as the model likes."""
    out = io.StringIO()

    Screen(out).step("answer", "word " * 40)

    first, *others = out.getvalue().splitlines()
    assert first.startswith("  answer    word")
    assert all(line.startswith("            word") for line in others)
    assert max(map(len, [first, *others])) <= 110


def test_an_empty_text_still_has_its_label():
    """A model may answer nothing."""
    out = io.StringIO()

    Screen(out).step("answer", "")

    assert out.getvalue() == "  answer    \n"
