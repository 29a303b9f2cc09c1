"""How the log looks."""

import io
import json
import logging
import re
import sys

import pytest

from pdrelay_proxy.io import logs
from pdrelay_proxy.io.log_formats import FACTS, JsonFormatter, TextFormatter
from pdrelay_proxy.settings import LogFormat


def record(message="two\nlines", *args, **more):
    return logging.makeLogRecord(
        {"name": "pdrelay_proxy.x", "msg": message, "args": args, "levelname": "WARNING"} | more
    )


def test_an_event_is_one_object_on_one_line():
    """Whatever is in it."""
    line = JsonFormatter().format(record("%s \u2028\n{", "a\r", created=1e9))

    assert "\n" not in line
    assert line.isascii()
    assert json.loads(line) == {
        "time": "2001-09-09T01:46:40.000+00:00",
        "level": "warning",
        "logger": "pdrelay_proxy.x",
        "message": "a\r \u2028\n{",
    }


def test_an_event_with_facts_has_them_as_fields_and_no_message():
    """It would say the same again."""
    said = json.loads(JsonFormatter().format(record(**{FACTS: {"id": "r", "status": 200, "prefill": None}})))

    assert said.keys() == {"time", "level", "logger", "id", "status", "prefill"}
    assert (said["status"], said["prefill"]) == (200, None)


def test_a_traceback_is_a_field():
    """Bugs must be found in a log that machines read, too."""
    try:
        raise KeyError("why")
    except KeyError:
        said = json.loads(JsonFormatter().format(record("it failed", exc_info=sys.exc_info())))

    assert said["message"] == "it failed"
    assert said["exception"].endswith("KeyError: 'why'")


@pytest.mark.parametrize(
    ("form", "worker", "looks"),
    [
        (LogFormat.TEXT, None, r"\d{4}-\d\d-\d\d [\d:,]+ INFO root hello you\n"),
        (LogFormat.TEXT, 3, r"\d{4}-\d\d-\d\d [\d:,]+ INFO worker 3 root hello you\n"),
        (LogFormat.JSON, None, r'\{"time": "[^"]+", "level": "info", "logger": "root", "message": "hello you"\}\n'),
        (
            LogFormat.JSON,
            0,
            r'\{"time": "[^"]+", "level": "info", "worker": 0, "logger": "root", "message": "hello you"\}\n',
        ),
    ],
)
def test_the_log_of_a_process_has_one_of_two_forms(form, worker, looks, monkeypatch):
    """On standard error, from the level on that was asked for; which worker calls an engine decode-3 must be seen."""
    root = logging.RootLogger(logging.WARNING)  # pytest's handlers are on the real one
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    logs.configure("info", form, worker=worker)
    root.debug("not this")
    root.info("hello %s", "you")

    assert re.fullmatch(looks, sys.stderr.getvalue())


FORGED = "0.32\n2026-11-28 12:00:00,000 INFO pdrelay_proxy forged"


def test_a_line_for_people_cannot_be_forged():
    """Versions, names and reasons are words of engines."""
    line = TextFormatter().format(record("decode-0 has version %s", FORGED))

    assert line.splitlines() == [line]
    assert line.endswith("WARNING pdrelay_proxy.x decode-0 has version " + FORGED.replace("\n", "\\n"))


def test_no_line_of_a_traceback_begins_as_a_record():
    """An exception says what an engine has answered."""
    try:
        raise ValueError(FORGED)
    except ValueError:
        lines = TextFormatter().format(record(FORGED, exc_info=sys.exc_info())).splitlines()

    assert lines[0].endswith("INFO pdrelay_proxy forged")
    assert lines[1] == "Traceback (most recent call last):"
    assert all(line.startswith("  ") for line in lines[2:])
