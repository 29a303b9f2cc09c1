"""A coroutine without a task: it is resumed by whoever has news for it, in the same turn of the event loop."""

from collections.abc import Coroutine, Generator


class Stepper:
    """Runs one coroutine, which may await nothing but its Stepper."""

    __slots__ = ("_has_news", "_interrupt", "_is_waiting", "_life")

    def __init__(self) -> None:
        self._life: Coroutine[object, None, None] | None = None
        self._is_waiting = self._has_news = False
        self._interrupt: Exception | None = None

    @property
    def is_running(self) -> bool:
        """Tell whether the coroutine has begun and not ended."""
        return self._life is not None

    def begin(self, life: Coroutine[object, None, None]) -> None:
        """Run the coroutine up to the first point at which it waits."""
        self._life = life
        self._step()

    def wake(self) -> None:
        """Something has happened: go on, or do not wait the next time."""
        if self._is_waiting:
            self._is_waiting = False
            self._step()
        else:
            self._has_news = True

    def interrupt(self, error: Exception) -> None:
        """Have waiting raise this from now on. The first error counts."""
        if self._interrupt is None:
            self._interrupt = error
            self.wake()

    def __await__(self) -> Generator[None, None, None]:
        """Wait until something has happened; it may be something else. Raises what interrupts the coroutine."""
        if self._has_news:
            self._has_news = False
        else:
            self._is_waiting = True
            yield
        if self._interrupt is not None:
            raise self._interrupt

    def end(self) -> None:
        """The coroutine is about to end: let go of it, and of what has interrupted it."""
        self._life = self._interrupt = None

    def _step(self) -> None:
        life = self._life
        if life is not None:
            try:  # noqa: SIM105 (suppress() costs a request 2 % of its time)
                life.send(None)
            except StopIteration:
                pass
