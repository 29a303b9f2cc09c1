"""How the lines of a batch are written."""

import io
import json
import logging
import re
import threading

import pytest

from pdrelay_proxy.core.model import InstanceId, RequestId
from pdrelay_proxy.core.request_record import LegRecord, RequestRecord
from pdrelay_proxy.io.log_formats import FACTS, JsonFormatter, TextFormatter
from pdrelay_proxy.io.logs import BatchingHandler, lines_together, note
from pdrelay_proxy.io.request_path.access_log import LOG, log_requests


class Written(io.StringIO):
    """Notes each write that reaches the file, and each flush."""

    def __init__(self):
        super().__init__()
        self.writes = []
        self.flushes = 0

    def write(self, text):
        self.writes.append(text)
        return super().write(text)

    def flush(self):
        self.flushes += 1


@pytest.fixture
def stream():
    return Written()


@pytest.fixture
def logger(stream):
    """A logger whose lines come to a handler of the root, as those of the router do."""
    handler = BatchingHandler()
    handler.setStream(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    root, mine = logging.getLogger(), logging.getLogger("tests.lines")
    others, root.handlers = root.handlers, [handler]  # the first that formats a traceback does it for all
    mine.setLevel(logging.INFO)
    yield mine
    root.handlers = others
    mine.setLevel(logging.NOTSET)


def handler_of_the_root():
    [handler] = [each for each in logging.getLogger().handlers if isinstance(each, BatchingHandler)]
    return handler


def formatted(form):
    handler_of_the_root().setFormatter(form)


def test_a_batch_is_one_write(logger, stream):
    """One system call for all its lines."""
    with lines_together():
        for number in range(5):
            logger.info("line %d", number)
        assert stream.writes == []

    assert stream.writes == ["line 0\nline 1\nline 2\nline 3\nline 4\n"]
    assert stream.flushes == 1


def test_an_empty_batch_writes_nothing(logger, stream):
    """Not even a flush."""
    with lines_together():
        logger.debug("is not shown")

    assert (stream.writes, stream.flushes) == ([], 0)


def test_what_was_said_before_an_exception_is_written(logger, stream):
    """And lines after it come at once again."""

    def block():
        with lines_together():
            logger.info("in")
            raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        block()
    assert stream.getvalue() == "in\n"
    logger.info("after")
    assert stream.getvalue() == "in\nafter\n"


def test_a_line_that_cannot_be_written_out_does_not_stop_the_others(logger, stream, capsys):
    """It is told as logging tells it."""
    formatted(JsonFormatter())
    endless = {}
    endless["itself"] = endless
    with lines_together():
        logger.info("one")
        logger.info("lost", extra={FACTS: endless})
        logger.info("two")

    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["one", "two"]
    assert "Logging error" in capsys.readouterr().err


def test_text_lines_of_a_batch_are_those_of_logging(logger, stream):
    """With tracebacks, and the time of each line."""
    formatted(TextFormatter())
    try:
        raise ValueError("why")
    except ValueError:
        with lines_together():
            logger.info("one %s", 1)
            logger.exception("two")
    one, two, *rest = stream.getvalue().splitlines()

    assert one.endswith(" INFO tests.lines one 1")
    assert two.endswith(" ERROR tests.lines two")
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-1] == "  ValueError: why"


@pytest.mark.parametrize("created", [0.0, 1e9, 1e9 + 0.0004, 1e9 + 0.9996, 1.5e9 + 0.25])
def test_the_time_of_a_text_line_is_that_of_logging(created):
    """Also of lines of one second, and of a second that has come back."""
    form = TextFormatter()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    for at in (created, created + 0.5, created + 1, created):
        made = logging.makeLogRecord(
            {"name": "n", "msg": "m %s", "args": (1,), "levelname": "INFO", "created": at, "msecs": at % 1 * 1000 // 1}
        )
        assert form.format(made) == plain.format(made)


class Gone(io.StringIO):
    """Who read the log has gone."""

    def write(self, text):
        raise BrokenPipeError(text)


def test_a_batch_that_cannot_be_written_stops_nobody(logger, monkeypatch):
    """As a line that is written at once does not: who settles is in the middle of a request."""
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handler_of_the_root().setStream(Gone())
    logger.info("at once")
    with lines_together():
        logger.info("in a batch")


def test_a_line_of_another_thread_is_not_lost(logger, stream):
    """It is being made while the batch ends."""
    started, go_on = threading.Event(), threading.Event()

    class Slow(logging.Formatter):
        def format(self, record):
            started.set()
            go_on.wait(30)
            return super().format(record)

    handler = handler_of_the_root()
    handler.setFormatter(Slow("%(message)s"))
    handler.begin()
    threads = [threading.Thread(target=logger.info, args=("slow",)), threading.Thread(target=handler.end)]
    try:
        threads[0].start()
        assert started.wait(30)
        threads[1].start()
        threads[1].join(0.1)  # it may have to wait
    finally:
        go_on.set()
        for thread in threads:
            thread.join(30)

    assert stream.getvalue() == "slow\n"


def test_a_batch_in_a_batch_loses_nothing(logger, stream):
    """A call that waits may settle what others have added meanwhile."""
    with lines_together():
        logger.info("one")
        with lines_together():
            logger.info("two")
        logger.info("three")

    assert stream.getvalue() == "one\ntwo\nthree\n"


@pytest.mark.parametrize("formatter", [TextFormatter, JsonFormatter])
def test_a_note_without_a_record_is_the_line_that_a_record_makes(formatter, monkeypatch):
    """Only the time differs, by what passes between the two."""
    lines = BatchingHandler()
    lines.setFormatter(formatter())
    lines.setStream(io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [lines])
    logger = logging.getLogger("pdrelay_proxy.note")
    monkeypatch.setattr(logger, "level", logging.INFO)
    found = {"id": "a", "path": "/v1", "ms": 1.5, "note": 'a "b"\n'}

    note(logger, found, dict, lambda facts: f"id={facts['id']}")  # the short way
    monkeypatch.setattr(lines, "filters", [lambda _: True])
    note(logger, found, dict, lambda facts: f"id={facts['id']}")  # the long one
    with lines_together():
        note(logger, found, dict, lambda facts: f"id={facts['id']}")
        assert lines.stream.getvalue().count("\n") == 2

    first, second, third = (without_time(line) for line in lines.stream.getvalue().splitlines())
    assert first == second == third
    assert "id=a" in first or '"id": "a"' in first


def without_time(line):
    return re.sub(r"\d\d:\d\d:\d\d[.,]\d{3}", "", line)


USUAL = RequestRecord(
    RequestId("r-1"),
    "/v1/completions",
    prefill=LegRecord(InstanceId("prefill-0")),
    decode=LegRecord(InstanceId("decode-0")),
)
USUAL.over(200, 0.01234)
ODD = RequestRecord(RequestId("r-2"), "/v1/odd\n path\\", client_id="c", decode=LegRecord(InstanceId("decode-0")))


@pytest.mark.parametrize("record", [USUAL, ODD, RequestRecord(RequestId("r-3"))])
def test_the_line_of_a_request_is_the_same_in_a_batch_and_by_itself(logger, stream, record):
    """It needs no logging record where only its text would come of one."""
    formatted(TextFormatter())
    root = logging.getLogger()
    level = logging.getLogger().level
    others = [each for each in root.handlers if not isinstance(each, BatchingHandler)]
    root.setLevel(logging.INFO)
    for each in others:
        root.removeHandler(each)
    try:
        log_requests([record])
        with lines_together():
            logger.info("before")
            log_requests([record])
            logger.info("after")
    finally:
        root.setLevel(level)
        for each in others:
            root.addHandler(each)

    alone, *together = stream.getvalue().splitlines()
    assert [line[24:] for line in together] == [
        "INFO tests.lines before",
        alone[24:],
        "INFO tests.lines after",
    ]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO pdrelay.access request_id=r-\d path=", alone)
    assert alone.isprintable()


def test_where_somebody_else_wants_the_line_it_is_a_record(logger, stream):
    """A filter, another handler, another format: all of them are asked."""
    seen = []
    formatted(TextFormatter())
    LOG.addFilter(lambda record: seen.append(record.getMessage()) or True)
    LOG.setLevel(logging.INFO)
    try:
        with lines_together():
            log_requests([USUAL])
    finally:
        LOG.filters.clear()
        LOG.setLevel(logging.NOTSET)

    assert seen == [
        "request_id=r-1 path=/v1/completions prefill=prefill-0 decode=decode-0 status=200 duration_ms=12.3 ttft_ms=- "
        "prefill_ms=- queue_ms=-"
    ]
    assert seen[0] in stream.getvalue()
