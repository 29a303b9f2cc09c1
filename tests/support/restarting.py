"""Engines that shell commands kill, freeze and start again, each with all it has started, for ``pdrelay prove``."""

import os
import shlex
import signal
import subprocess
from contextlib import ExitStack, contextmanager

import httpx

from pdrelay_tools.local.recipe import engine
from pdrelay_tools.proving.peers import Deed
from support.cluster import wait_until


class Restartable:
    """One engine, in a session of its own."""

    def __init__(self, spec, folder):
        command = engine(spec, os.environ)
        self.spec = spec
        self.health_url = command.health_url
        script, self._log = folder / f"{spec.name}.sh", folder / f"{spec.name}.log"
        self._pid = folder / f"{spec.name}.pid"
        environment = [f"{name}={value}" for name, value in command.environment.items()]
        # What is started again is nobody's child: it ends with the tests all the same, however they end.
        watch = f"(tail --pid={os.getpid()} -f /dev/null; kill -s KILL 0) &\n"
        script.write_text(f"{watch}exec {shlex.join(['env', '-i', *environment, *command.argv])}\n")
        group = f'-- "-$(cat {shlex.quote(str(self._pid))})"'
        start = f"setsid sh {shlex.quote(str(script))} >>{shlex.quote(str(self._log))} 2>&1 </dev/null"
        self.commands = {
            Deed.KILL: f"kill -s KILL {group}",
            Deed.FREEZE: f"kill -s STOP {group}",
            Deed.THAW: f"kill -s CONT {group}",
            Deed.RESTART: f"{start} & echo $! >{shlex.quote(str(self._pid))}",
        }

    def do(self, deed):
        """Do it as the suite does."""
        subprocess.run(self.commands[deed], shell=True, check=True)

    def flags(self, role):
        """Return the flags of the suite: how all of it is done to the first engine of a role."""
        return [f"--{deed}-{role}={command}" for deed, command in self.commands.items()]

    def serves(self):
        """Tell whether it serves; fails with the end of its log when it has ended."""
        assert self.is_alive(), self._log.read_text()[-3000:]
        try:
            return httpx.get(self.health_url, timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def is_alive(self):
        try:
            os.kill(int(self._pid.read_text()), 0)
        except ProcessLookupError:
            return False
        return True

    def end(self):
        """Kill it, frozen or not."""
        try:
            os.killpg(int(self._pid.read_text()), signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):
            return


@contextmanager
def restartable(folder, *specs, timeout_s):
    """Start engines and yield them; all of them are dead behind it."""
    with ExitStack() as stack:
        found = [Restartable(spec, folder) for spec in specs]
        for each in found:
            stack.callback(each.end)
            each.do(Deed.RESTART)
        for each in found:
            wait_until(each.serves, seconds=timeout_s, what=f"{each.spec.name} serves")
        yield found
