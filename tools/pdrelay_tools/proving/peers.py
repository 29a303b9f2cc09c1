"""What can be done to an engine's process: by a command of the user, or by signals to a process of
this machine.
"""

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

_COMMAND_S: Final = 300.0  # for a command: a restart may wait for its engine
_SHOWN: Final = 300  # characters of what a command said


class Deed(StrEnum):
    """What is done."""

    KILL = "kill"
    FREEZE = "freeze"
    THAW = "thaw"
    RESTART = "restart"


class DeedFailed(Exception):
    """It could not be done; the message says why."""


_SIGNALS: Final = {
    Deed.KILL: signal.SIGKILL,
    Deed.FREEZE: signal.SIGSTOP,
    Deed.THAW: signal.SIGCONT,
}


@dataclass(frozen=True, slots=True)
class Peers:
    """How the first prefill and the first decode engine are killed, frozen and restarted; by
    role.
    """

    commands: Mapping[tuple[str, Deed], str] = field(default_factory=dict[tuple[str, Deed], str])
    pids: Mapping[str, int] = field(default_factory=dict[str, int])

    def can(self, role: str, *deeds: Deed) -> bool:
        """Tell whether all of it can be done."""
        by_signal = role in self.pids
        return all(
            (role, deed) in self.commands or (by_signal and deed in _SIGNALS) for deed in deeds
        )

    async def do(self, role: str, deed: Deed) -> None:
        """Do it; raises DeedFailed."""
        if (command := self.commands.get((role, deed))) is not None:
            await _run(command, f"--{deed}-{role}")
        elif role in self.pids and deed in _SIGNALS:
            _signal(self.pids[role], _SIGNALS[deed])
        else:
            raise DeedFailed(
                f"nothing says how to {deed} the {role} engine: --{deed}-{role} COMMAND"
            )


async def _run(command: str, flag: str) -> None:
    process = await asyncio.create_subprocess_shell(
        command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_COMMAND_S):
            said, _ = await process.communicate()
    except TimeoutError as exc:
        raise DeedFailed(f"the command of {flag} did not end within {_COMMAND_S:g} s") from exc
    finally:
        if process.returncode is None:  # nobody waits for it any more
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        shown = said.decode(errors="replace").strip()[-_SHOWN:]
        raise DeedFailed(f"the command of {flag} ended with {process.returncode}: {shown}")


def _signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and to everything that it started."""
    for one in (*_descendants(pid), pid):
        try:
            os.kill(one, number)
        except ProcessLookupError as exc:
            if one == pid:
                raise DeedFailed(f"there is no process {pid}") from exc
        except PermissionError as exc:
            raise DeedFailed(f"process {one} is not ours to signal") from exc


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that these started."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                children = [int(word) for word in task.read_text().split()]
            except OSError:  # it has ended
                continue
            found += children
            waiting += children
    return found
