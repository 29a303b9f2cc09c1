"""What waits for a moment is done in one go, and none of it is lost."""

import logging
from contextlib import contextmanager

import pytest

from pdrelay_proxy.io.request_path.deferred import DeferredCalls
from support.sim import until_async as until

MOST = 1024


class Batches:
    """Notes when a batch begins and ends."""

    def __init__(self):
        self.said = []

    @contextmanager
    def __call__(self):
        self.said.append("(")
        yield
        self.said.append(")")


async def test_calls_are_made_soon_and_in_order():
    """By themselves, together, and each once."""
    batches = Batches()
    later = DeferredCalls(batches)
    for number in range(3):
        later.add(batches.said.append, number)
    assert batches.said == []

    await until(lambda: batches.said)
    assert batches.said == ["(", 0, 1, 2, ")"]
    later.settle()
    assert batches.said == ["(", 0, 1, 2, ")"]


async def test_who_reads_settles_first():
    """And the timer does nothing more."""
    batches = Batches()
    later = DeferredCalls(batches)
    later.add(batches.said.append, 1)
    later.settle()
    assert batches.said == ["(", 1, ")"]

    later.add(batches.said.append, 2)  # has a timer of its own
    await until(lambda: 2 in batches.said)
    assert batches.said == ["(", 1, ")", "(", 2, ")"]


async def test_one_that_fails_does_not_stop_the_others(caplog):
    """It is a bug, and logged with where it came from."""

    def broken(number):
        raise ValueError(number)

    said = []
    later = DeferredCalls()
    later.add(said.append, 1)
    later.add(broken, 7)
    later.add(said.append, 2)
    with caplog.at_level(logging.ERROR):
        later.settle()

    assert said == [1, 2]
    [record] = caplog.records
    assert "broken" in record.getMessage()
    assert record.exc_info[0] is ValueError


async def test_only_so_many_wait():
    """A loop that has no time for the timer does not fill the memory."""
    batches = Batches()
    later = DeferredCalls(batches)
    for number in range(MOST - 1):
        later.add(batches.said.append, number)
    assert batches.said == []

    later.add(batches.said.append, MOST - 1)
    assert batches.said == ["(", *range(MOST), ")"]
    later.add(batches.said.append, MOST)
    assert len(batches.said) == MOST + 2
    later.settle()
    assert batches.said[MOST + 2 :] == ["(", MOST, ")"]


@pytest.mark.parametrize("by_hand", [True, False])
async def test_a_call_may_add_another(by_hand):
    """It comes with the next batch, by itself or with the next settling."""
    batches = Batches()
    later = DeferredCalls(batches)

    def first():
        batches.said.append(1)
        later.add(batches.said.append, 2)

    later.add(first)
    later.settle()
    assert batches.said == ["(", 1, ")"]

    if by_hand:
        later.settle()
    await until(lambda: 2 in batches.said)
    assert batches.said == ["(", 1, ")", "(", 2, ")"]


async def test_a_call_may_settle():
    """What reads a counter does; the batch goes on once, and in order."""
    batches = Batches()
    later = DeferredCalls(batches)
    later.add(later.settle)
    later.add(batches.said.append, 1)
    later.settle()

    assert batches.said == ["(", 1, ")"]
