"""One thread that owns a core and its link: takes commands, feeds events, keeps time."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar

from pdrelay_connector.core.ports import LinkEvent
from pdrelay_connector.errors import ConnectorError
from pdrelay_connector.io.link import SocketLink

FINE = 0.001  # s: selectors round up to a millisecond, so shorter waits are slept
LONGEST = 3600.0  # s: selectors count milliseconds in 32 bits, and a lease may be longer than that


class Core(Protocol):
    """What a thread can run."""

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Take in an event."""
        ...

    def advance(self, *, now: float) -> float | None:
        """Do what is due; return when to be called again at the latest, None for never."""
        ...


CoreT = TypeVar("CoreT", bound=Core)
AnswerT = TypeVar("AnswerT")
Command: TypeAlias = Callable[[CoreT, float], None]


class Runner(Generic[CoreT]):
    """Started once, by the shell.

    Everything but :meth:`post` and :meth:`stop` happens on its own thread, ``begin`` first.
    """

    def __init__(
        self,
        name: str,
        core: CoreT,
        link: SocketLink,
        after_turn: Callable[[CoreT], None] = lambda _: None,
        *,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = core
        self._link = link
        self._after_turn = after_turn
        self._begin = begin
        self._commands: queue.SimpleQueue[Command[CoreT]] = queue.SimpleQueue()
        self._stopping = False
        self._turn_began: float | None = None  # absent while the thread waits
        self._died: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, command: Command[CoreT]) -> None:
        """Have the thread call ``command(core, now)`` before it handles any later message.

        Raises :exc:`~pdrelay_connector.errors.ConnectorError` if the thread has died of a bug: the
        engine must not go on as if KV were still moving.
        """
        self.check()
        self._commands.put(command)
        self._link.wake()

    def ask(self, question: Callable[[CoreT], AnswerT], *, timeout: float) -> AnswerT:
        """Return ``question(core)`` from the thread; raises ``ConnectorError`` on a timeout."""
        answers: queue.SimpleQueue[AnswerT] = queue.SimpleQueue()
        self.post(lambda core, _: answers.put(question(core)))
        try:
            return answers.get(timeout=timeout)
        except queue.Empty:
            self.check()
            raise ConnectorError(f"thread {self._thread.name} does not answer") from None

    def check(self) -> None:
        """Raise :exc:`~pdrelay_connector.errors.ConnectorError` if the thread has died."""
        if self._died is not None:
            raise ConnectorError(f"thread {self._thread.name} died: {self._died!r}") from self._died

    @property
    def busy_s(self) -> float:
        """For how many seconds the thread has been in its present turn; 0 while it waits."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread and close its sockets; waits at most ``timeout`` seconds."""
        self._stopping = True
        self._link.wake()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._begin()
            # the first turn does not wait: a core may have something to begin
            due: float | None = 0.0
            while not self._stopping:
                due = self._iterate(due)
        except BaseException as exc:
            self._died = exc
            raise
        finally:
            self._link.stop()

    def _iterate(self, due: float | None) -> float | None:
        self._turn_began = None
        events = self._link.poll(self._wait(due))
        self._turn_began = time.monotonic()
        # Commands first: what the engine did before its reply left must be known before the peer's
        # answer to it.
        while not self._commands.empty():
            self._commands.get()(self._core, time.monotonic())
        for event in events:
            self._core.on(event, now=time.monotonic())
        due = self._core.advance(now=time.monotonic())
        self._after_turn(self._core)
        return due

    def _wait(self, due: float | None) -> float | None:
        if due is None:
            return None
        remaining = due - time.monotonic()
        if 0 < remaining < FINE:
            time.sleep(remaining)
        return 0.0 if remaining < FINE else min(remaining, LONGEST)
