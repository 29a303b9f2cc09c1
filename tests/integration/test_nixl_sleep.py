"""Sleep and wake with real NIXL, sockets and threads: what vLLM calls on the scheduler and the worker of two engines.

What an engine's memory holds is lost when it sleeps, as on a GPU.
"""

import time

import pytest

from pdrelay_connector.core.ids import EngineId
from pdrelay_connector.settings import Mode
from support.connector_process import BLOCKS, PARTS, ConnectorProcess, same, same_as
from support.proc import held_by

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]


@pytest.fixture
def start():
    started = []

    def start(mode, staging=0):
        started.extend(ConnectorProcess(name, mode, staging) for name in ("p", "d"))
        return started

    yield start
    for process in started:
        process.stop()


@pytest.mark.parametrize("staging", [0, PARTS])
def test_kv_is_read_after_both_have_slept_and_not_across(start, staging):
    """The same port, another generation: what was offered before is refused, and nothing is read."""
    p, d = start(Mode.PULL, staging)
    p.fill(1)
    p.lend("a")
    before = p.engine
    assert not d.load("a", p, before)
    assert same(p, d)
    for process in (p, d):
        process.sleep()
        process.wake_up()
    p.fill(2)
    p.lend("b")
    d.caches["l.0"].fill_(7)

    assert d.load("b", p, before)  # whoever names the engine of before gets nothing of the one of now
    assert (d.caches["l.0"] == 7).all()
    assert (before, p.engine) == ("p", "p_gen1")
    p.lend("c")
    assert not d.load("c", p, p.engine)
    assert same(p, d)


def test_who_asks_an_engine_that_sleeps_is_told_so(start, caplog):
    """Over the real side channel, too."""
    p, d = start(Mode.PULL)
    p.fill(1)
    p.lend("a")
    p.sleep()

    assert d.load("a", p, EngineId("p"))
    assert "this engine sleeps" in caplog.text
    p.wake_up()


@pytest.mark.parametrize("transports", ["tcp", "all"])
def test_a_read_that_p_has_not_heard_of_counts_for_nothing(start, monkeypatch, transports):
    """Its word may be on the way when P revokes. P's memory goes meanwhile, and neither engine comes to harm."""
    monkeypatch.setenv("UCX_TLS", transports)
    p, d = start(Mode.PULL)
    p.lend("first")
    assert not d.load("first", p, p.engine)
    failed = []
    for number in range(20):
        p.fill(number)
        name = f"r{number}"
        p.lend(name)
        d.order(name, p, p.engine)
        time.sleep(number % 10 * 0.001)
        p.sleep()
        failed.append(d.wait(name, p))
        is_right = same_as(number, d)
        assert failed[-1] or is_right, "what does not count was taken"
        p.wake_up()
        p.fill(1000 + number)
        p.lend(f"again {number}")
        assert not d.load(f"again {number}", p, p.engine)
        assert same(p, d)

    assert any(failed)


@pytest.mark.parametrize("staging", [0, BLOCKS])
def test_kv_is_pushed_after_both_have_slept(start, staging):
    """P's worker finds its scheduler under its new name, and D lends the memory that it has now."""
    p, d = start(Mode.PUSH, staging)
    for number in range(2):
        p.fill(number)
        p.push(f"t{number}", d)

        assert same(p, d)
        for process in (d, p):
            process.sleep()
            process.wake_up()


def test_many_sleeps_cost_nothing(start):
    """Reinforcement learning has engines sleep after each step: sockets, memory and threads must not add up."""
    p, d = start(Mode.PULL, PARTS)  # with all that an engine can have
    sizes = []
    for number in range(30):
        p.lend(f"r{number}")
        assert not d.load(f"r{number}", p, p.engine)
        p.sleep()
        p.wake_up()
        if number >= 10:
            sizes.append(held_by("self"))

    # What opens connections ends a moment later than they do: the least of several looks is what stays.
    memory, files, threads = (
        [min(looks) for looks in (of_all[:5], of_all[-5:])] for of_all in zip(*sizes, strict=True)
    )
    assert files[1] <= files[0] + 2
    assert memory[1] <= memory[0] + 20e6
    assert threads[1] <= threads[0]
