"""Kills, freezes and restarts engines, by the user's commands, or by signals on this machine."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

_COMMAND_S: Final = 300.0  # for a command: a restart may wait for its engine
_SHOWN: Final = 300  # characters of what a command said


class Deed(StrEnum):
    """An action on an engine's process."""

    KILL = "kill"
    FREEZE = "freeze"
    THAW = "thaw"
    RESTART = "restart"


class DeedFailed(Exception):
    """The action failed; the message says why."""


_SIGNALS: Final = {
    Deed.KILL: signal.SIGKILL,
    Deed.FREEZE: signal.SIGSTOP,
    Deed.THAW: signal.SIGCONT,
}


@dataclass(frozen=True, slots=True)
class Peers:
    """Commands and process ids for the first engine of each role."""

    commands: Mapping[tuple[str, Deed], str] = field(default_factory=dict[tuple[str, Deed], str])
    pids: Mapping[str, int] = field(default_factory=dict[str, int])

    def can(self, role: str, *deeds: Deed) -> bool:
        """Tell whether all these actions are possible."""
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
    # no pipe: an engine that the command leaves running would hold it open
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_shell(
            command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_COMMAND_S):
                await process.wait()
        except TimeoutError as exc:
            raise DeedFailed(f"the command of {flag} did not end within {_COMMAND_S:g} s") from exc
        finally:
            if process.returncode is None:  # it took too long, or the run was cancelled
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            output.seek(0)
            shown = output.read().decode(errors="replace").strip()[-_SHOWN:]
            raise DeedFailed(f"the command of {flag} ended with {process.returncode}: {shown}")


def _signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, before it can see what becomes of its own, and to all these."""
    for target in (pid, *_descendants(pid)):
        try:
            os.kill(target, number)
        except ProcessLookupError as exc:
            if target == pid:
                raise DeedFailed(f"there is no process {pid}") from exc
        except PermissionError as exc:
            raise DeedFailed(f"process {target} is not ours to signal") from exc


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that these started."""
    descendants: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = [int(word) for word in task.read_text().split()]
            except OSError:  # it has ended
                continue
            descendants += children
            waiting += children
    return descendants
