"""The log when its reader, or its disk, does not take it: nothing waits, and what is lost is counted."""

import errno
import logging
import os
import threading

import pytest

from pdrelay_proxy.io.log_writer import LogWriter, PromptWriter

PATIENCE_S = 30.0


class Reader:
    """The other end: takes what it is allowed to."""

    def __init__(self):
        self.taken = b""
        self.may_write = threading.Event()
        self.is_asked = threading.Event()
        self.error = None
        self.most = 1 << 20  # bytes that one call takes

    def __call__(self, data):
        self.is_asked.set()
        assert self.may_write.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.taken += bytes(data[: self.most])
        return min(len(data), self.most)


@pytest.fixture
def reader():
    found = Reader()
    yield found
    found.may_write.set()


def test_a_reader_that_takes_nothing_stops_nobody(reader, caplog):
    """The queue has room for so much; what comes later is counted, and said when the reader reads again."""
    writer = LogWriter(reader, most=100)
    writer.write("first\n")
    assert reader.is_asked.wait(PATIENCE_S)
    for _ in range(50):
        writer.write("123456789\n")

    assert writer.dropped == 50 - 9
    with caplog.at_level(logging.WARNING):
        reader.may_write.set()
        writer.close()
        writer.write("later\n")
        writer.close()
    assert reader.taken == b"first\n" + b"123456789\n" * 9 + b"later\n"
    assert [one for one in caplog.messages if one.startswith("41 lines of the log were dropped")]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EPIPE, errno.EBADF, errno.EIO])
def test_a_line_that_the_system_does_not_take_is_dropped(reader, error):
    """The next one may be taken: somebody has made room. It begins a line of its own."""
    writer = LogWriter(reader)
    reader.may_write.set()
    reader.most = 4
    writer.write("half\n")
    writer.close()
    reader.error = OSError(error, os.strerror(error))
    writer.write("lost\nlost, too\n")
    writer.close()
    reader.error = None
    writer.write("here \udcff\n")
    writer.close()

    assert writer.dropped == 2
    assert reader.taken == b"half\nhere \\udcff\n"


def test_a_line_behind_half_of_one_begins_anew():
    """The disk was full in the middle of a line."""
    taken = []

    def write(data):
        if len(taken) == 1:
            taken.append(b"")
            raise OSError(errno.ENOSPC, "full")
        taken.append(bytes(data[:3] if not taken else data))
        return len(taken[-1])

    writer = LogWriter(write)
    writer.write("half of it\n")
    writer.close()
    writer.write("whole\n")
    writer.close()

    assert b"".join(taken) == b"hal\nwhole\n"
    assert writer.dropped == 1


def test_the_end_waits_for_what_is_left_and_not_for_ever(reader):
    """The last lines say why."""
    writer = LogWriter(reader, close_s=0.01)
    writer.write("last\n")
    writer.close()
    assert reader.taken == b""


def test_a_descriptor_that_does_not_block_is_waited_for():
    """Another program that shares it may have set that."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        writer = LogWriter.to(writing)
        writer.write("x" * 199_999 + "\n")
        received = b""
        while not received.endswith(b"\n"):
            received += os.read(reading, 65536)
        writer.close()
    finally:
        os.close(reading)
        os.close(writing)

    assert (len(received), writer.dropped) == (200_000, 0)


def test_a_process_without_a_thread_drops_what_its_reader_does_not_take():
    """It has signals to pass on, and workers to start again."""
    reading, writing = os.pipe()
    writer = PromptWriter.to(writing)
    writer.write("first\n")
    for _ in range(100):
        writer.write("x" * 1000 + "\n")
    taken = os.read(reading, 1 << 20)
    writer.write("last\n")

    assert taken.startswith(b"first\nxxx")
    assert len(taken) < 100 * 1000
    assert os.read(reading, 1 << 20) == b"last\n"
    os.close(reading)
    writer.write("to nobody\n")
    os.close(writing)
