"""A process with memory that another one reads or writes over NIXL."""

import json
import os
import subprocess
import sys
import threading
import time
import uuid

import numpy as np

USUAL_US = 1000  # microseconds between two polls of NIXL's thread
OWN_DELAY = 0.001  # s between the calls of a process whose agent has no thread


def own(size, delay_us=USUAL_US):
    """Return an agent, memory that it has registered, and what others must know of the agent;
    ``delay_us`` below 0: the agent has no progress thread.
    """
    from nixl import _api

    from pdrelay_connector.io.nixl import make_agent, register

    name = str(uuid.uuid4())
    if delay_us >= 0:
        agent = make_agent(name, progress_delay_us=delay_us)
    else:
        config = _api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent = _api.nixl_agent(name, config)
    memory = np.ones(size, dtype=np.uint8)
    return agent, memory, register(agent, "DRAM", 0, [(memory.ctypes.data, size)])


class Holder:
    """The process, which ends with the one that has started it."""

    def __init__(self, size, delay_us=USUAL_US, **environment):
        argv = [sys.executable, "-m", "benchmarks.connector.holder", str(size), str(delay_us)]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._process.stdin.close()
        self._process.wait(10)

    def described(self):
        """Return what others must know of its agent, and where its memory is."""
        metadata, address = self._said()
        return bytes.fromhex(metadata), address

    def idle_cores(self, seconds):
        """Return the share of a core that the process uses while nobody reads, and this one."""
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        began = time.monotonic()
        used = time.process_time()
        return self._said(), (time.process_time() - used) / (time.monotonic() - began)

    def _said(self):
        """NIXL writes its log to stdout, too."""
        return json.loads(
            next(line for line in self._process.stdout if line.startswith('{"said"'))
        )["said"]


def main(size, delay_us):
    agent, memory, metadata = own(size, delay_us)
    _say((metadata.hex(), memory.ctypes.data))
    if delay_us < 0:
        threading.Thread(target=_progress, args=(agent,), daemon=True).start()
    for line in sys.stdin:
        began = time.monotonic()
        used = time.process_time()
        time.sleep(float(line))
        _say((time.process_time() - used) / (time.monotonic() - began))


def _say(value):
    print(json.dumps({"said": value}), flush=True)


def _progress(agent):
    while True:
        time.sleep(OWN_DELAY)
        agent.get_new_notifs()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
