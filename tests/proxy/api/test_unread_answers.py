"""Clients that do not read: when their connections are ended, told on a clock that a test moves."""

import asyncio

from pdrelay_proxy.api.unread_answers import UnreadAnswers
from support.simulated_loop import advance, in_simulated_time

PATIENCE_S = 30.0


class Reader:
    """A connection whose client has taken so many bytes; None: all of them."""

    def __init__(self, answers, taken=None):
        self.answers = answers
        self.taken = taken
        self.ended_at = None
        answers.enter(self)

    def bytes_taken(self):
        return self.taken

    def on_unread(self, seconds):
        assert seconds == PATIENCE_S
        self.ended_at = asyncio.get_running_loop().time()
        self.answers.leave(self)


def told(scene, limit=PATIENCE_S):
    """Tell a story of connections; return how often one was ended."""
    counted = []
    in_simulated_time(scene(UnreadAnswers(limit, lambda: counted.append(1))))
    return len(counted)


def test_a_client_that_takes_nothing_is_ended_after_its_time():
    """All of a crowd, though each turn of the loop has some of them."""

    async def scene(answers):
        readers = [Reader(answers, 5) for _ in range(1_000)]
        await advance(PATIENCE_S)
        assert not any(reader.ended_at for reader in readers)
        await advance(PATIENCE_S / 5)
        assert all(PATIENCE_S <= reader.ended_at <= PATIENCE_S * 1.2 for reader in readers)

    assert told(scene) == 1_000


def test_a_client_that_takes_a_byte_now_and_then_has_all_the_time_that_it_needs():
    """And is ended when it takes no more."""

    async def scene(answers):
        reader = Reader(answers, 5)
        for _ in range(20):
            await advance(PATIENCE_S * 0.8)
            reader.taken += 1
        assert reader.ended_at is None
        await advance(PATIENCE_S * 1.2)
        assert reader.ended_at is not None

    assert told(scene) == 1


def test_time_without_unread_bytes_does_not_count():
    """Of a connection that rests, or that has been read to the end meanwhile."""

    async def scene(answers):
        reader = Reader(answers)
        for rests, waits in ((5, 0.9), (0.2, 0.9)):
            reader.taken = None
            await advance(PATIENCE_S * rests)
            reader.taken = 0
            await advance(PATIENCE_S * waits)

    assert told(scene) == 0


def test_no_timer_is_left_behind_the_last_connection():
    """A router without clients does nothing."""

    async def scene(answers):
        before = asyncio.get_running_loop().time()
        for _ in range(3):
            readers = [Reader(answers, 5), Reader(answers)]
            await advance(PATIENCE_S / 20)
            for reader in [*readers, readers[0]]:
                answers.leave(reader)
        assert asyncio.get_running_loop().time() < before + PATIENCE_S
        assert not [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]

    assert told(scene) == 0


def test_without_a_limit_nobody_is_ended():
    """As where the port has none."""

    async def scene(answers):
        Reader(answers, 5)
        await advance(1e6)

    assert told(scene, None) == 0
