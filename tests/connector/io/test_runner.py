"""One thread, one core: order, time and death."""

import threading
import time
from itertools import pairwise

import pytest

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.ports import ConnectFailed
from pdrelay_connector.core.session.handshake import HandshakeClient
from pdrelay_connector.errors import ConnectorError
from pdrelay_connector.io.link import SocketLink
from pdrelay_connector.io.runner import LONGEST, Runner
from pdrelay_connector.io.tls import Tls
from pdrelay_connector.settings import Settings

pytestmark = pytest.mark.edges


class Log:
    """A core that notes what it is told, in order, and on which thread."""

    def __init__(self, due=None):
        self.seen, self.threads, self.due = [], set(), due
        self.turns = threading.Semaphore(0)

    def note(self, what):
        self.threads.add(threading.current_thread().name)
        self.seen.append(what)

    def on(self, event, *, now):
        self.note(type(event))

    def advance(self, *, now):
        return self.due(now) if self.due else None

    def turned(self, _):
        self.turns.release()


class Started:
    def __init__(self, core, **options):
        self.core = core
        self.link = SocketLink(
            HandshakeClient(EngineId("d"), tuple), Tls(Settings()), Counters(), timeout=1.0, threads=1
        )
        self.runner = Runner("under-test", core, self.link, core.turned, **options)

    def __enter__(self):
        self.runner.start()
        return self.runner

    def __exit__(self, *_):
        self.runner.stop()


def first_turn(core, now):
    """A core that was never called has not said yet when it wants to be."""


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    assert condition()


def test_commands_run_in_order_on_the_thread():
    """The engine only posts: it never waits for a socket or for NIXL."""
    core = Log()
    with Started(core) as runner:
        for number in range(100):
            runner.post(lambda core, now, number=number: core.note(number))
        wait_for(lambda: len(core.seen) == 100)

    assert core.seen == list(range(100))
    assert core.threads == {"under-test"}


def test_the_thread_begins_with_what_it_must_be_before_anything_else():
    """A thread that is not bound to its device must call nothing of NIXL, and a command may."""
    log = Log()
    with Started(log, begin=lambda: log.note("bound")) as runner:
        runner.post(lambda core, now: core.note("a"))
        log.turns.acquire(timeout=10)

    assert log.seen == ["bound", "a"]
    assert log.threads == {"under-test"}


def test_a_turn_that_does_not_end_is_seen_from_outside():
    """A call of NIXL may never return. Waiting is no turn."""
    core = Log()
    goes_on = threading.Event()
    with Started(core) as runner:
        core.turns.acquire(timeout=10)
        wait_for(lambda: runner.busy_s == 0)
        runner.post(lambda core, now: goes_on.wait(10))
        wait_for(lambda: runner.busy_s > 0.05)
        goes_on.set()
        wait_for(lambda: runner.busy_s == 0)


def test_commands_come_before_events():
    """What the engine did before its answer left must be known before the peer's reaction to it."""
    core = Log()
    started = Started(core)
    started.link.connect(Address("127.0.0.1", 1), EngineId("p"))
    time.sleep(0.1)
    started.runner.post(lambda core, now: core.note("command"))
    with started:
        wait_for(lambda: len(core.seen) == 2)

    assert core.seen == ["command", ConnectFailed]


def test_commands_know_the_time():
    """Monotonic, and when they run."""
    core = Log()
    before = time.monotonic()
    with Started(core) as runner:
        runner.post(lambda core, now: core.note(now))
        wait_for(lambda: core.seen)

    assert before <= core.seen[0] <= time.monotonic()


@pytest.mark.parametrize(("due_s", "turns", "most_s"), [(0.05, 4, 2), (0.0002, 200, 0.001)])
def test_the_core_is_called_when_it_asked_to_be(due_s, turns, most_s):
    """Without any traffic; and within less than a millisecond, to which selectors round up.

    The shortest of its pauses tells that: a busy machine makes others longer.
    """
    called = []

    def due(now):
        called.append(now)
        return now + due_s

    core = Log(due=due)
    with Started(core) as runner:
        runner.post(first_turn)
        for _ in range(turns):
            assert core.turns.acquire(timeout=20)
        seen = called[:turns]  # before the end, which wakes it too

    assert seen[-1] - seen[0] >= (turns - 2) * due_s * 0.99  # our command has made one of its pauses shorter
    assert min(later - now for now, later in pairwise(seen[-turns // 2 :])) < most_s


def test_sleeping_costs_nothing():
    """A second without anything to do."""
    core = Log()
    used = []
    with Started(core) as runner:
        runner.post(lambda core, now: used.append(time.thread_time()))
        time.sleep(1)
        runner.post(lambda core, now: used.append(time.thread_time()))
        wait_for(lambda: len(used) == 2)

    assert used[1] - used[0] < 0.02


def test_a_time_beyond_what_the_system_can_wait_for_is_no_error():
    """A lease of a year: the thread looks earlier, instead of dying of an overflow."""
    core = Log(due=lambda now: now + 1e9)
    with Started(core) as runner:
        runner.post(first_turn)
        assert core.turns.acquire(timeout=20)
        core.seen.clear()
        runner.post(lambda core, now: core.note("alive"))
        wait_for(lambda: core.seen)

    assert LONGEST * 1000 < 2**31


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_is_not_silent():
    """The engine must not go on as if KV were still moving: its next command, or question, raises."""
    core = Log()
    with Started(core) as runner:
        runner.post(lambda core, now: 1 / 0)
        runner._thread.join(20)

        with pytest.raises(ConnectorError, match=r"under-test died: ZeroDivisionError"):
            runner.post(lambda core, now: None)
        with pytest.raises(ConnectorError, match="died"):
            runner.check()


def test_stop_ends_the_thread():
    """At once, although it sleeps."""
    started = Started(Log())
    start = time.monotonic()
    with started:
        pass

    assert time.monotonic() - start < 20
    assert "under-test" not in [thread.name for thread in threading.enumerate()]


def test_the_first_turn_does_not_wait():
    """A core that has something to begin (to call its own scheduler) would otherwise wait until somebody wakes it."""
    core = Log()
    with Started(core):
        assert core.turns.acquire(timeout=20)
