"""How fast NIXL moves bytes between two processes, by size of descriptors, and how fast the device copies them itself.

``python -m support.transfer_rates DEVICE PEER SECONDS MIB`` prints a line of JSON for each measurement, as it is made.
It starts a process that holds the peer's memory, READs from it and WRITEs into it, and copies with torch in the same
run. SECONDS are those of each measurement, MIB is the memory of each end.
"""

import json
import os
import subprocess
import sys
import time
import uuid
from itertools import pairwise
from statistics import median

from support.device_memory import TensorMemory, binding_of, place_of

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)  # bytes of a descriptor
MOST = 4096  # descriptors of a transfer
LONGEST = 30.0  # s for one transfer
OPERATIONS = ("READ", "WRITE")


def measured(device, peer, *, seconds, mib, ucx, timeout):
    """Run it; return the rows that came, and why it did not come to its end, if so."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    argv = [sys.executable, "-m", "support.transfer_rates", device, peer, str(seconds), str(mib)]
    env = {**os.environ, "PYTHONPATH": path, "UCX_LOG_LEVEL": "error", "UCX_NET_DEVICES": "lo", **ucx}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()  # its child ends with its stdin
            out, err = process.communicate()
            err = f"not over within {timeout:.0f} s; {err}"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith('{"row"')]
    fault = f"{device} and {peer}: exit code {process.returncode} after {len(rows)} rows: {err[-2000:]}"
    return [row["row"] for row in rows], fault if process.returncode else ""


def info_of(agent, memory, device):
    """What the other end must know of this memory, which is one region."""
    from pdrelay_connector.core.messages import RankInfo, Region
    from pdrelay_connector.io.nixl import register

    size = memory.nbytes
    place = place_of(device)
    metadata = register(agent, *place, [(memory.address, size)])
    return RankInfo(0, 1, metadata, *place, (Region(memory.address, 1, 1, 1, size, size, size, size),))


def new_agent(device):
    from pdrelay_connector.io.nixl import make_agent

    return make_agent(str(uuid.uuid4()), progress_delay_us=1000, bind=binding_of(device))


def hold(device, mib):
    """Own memory that the other process reads and writes, and say a byte of it when asked."""
    import msgspec

    memory = TensorMemory(device, (1, 1, mib << 20))
    agent = new_agent(device)
    memory.paint([0], 3)
    print(json.dumps({"info": msgspec.msgpack.encode(info_of(agent, memory, device)).hex()}), flush=True)
    for line in sys.stdin:
        at = int(line)
        print(json.dumps({"byte": memory.tensor[0, 0, at].item()}), flush=True)


class Mover:
    """This process's memory and NIXL, beside a process that holds the peer's."""

    def __init__(self, device, peer, mib):
        import msgspec

        from pdrelay_connector.core.messages import RankInfo
        from pdrelay_connector.io.nixl import NixlTransferAgent

        argv = [sys.executable, "-m", "support.transfer_rates", "hold", peer, str(mib)]
        self.holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.memory = TensorMemory(device, (1, 1, mib << 20))
        agent = new_agent(device)
        info_of(agent, self.memory, device)
        self.agent = NixlTransferAgent(agent, *place_of(device))
        self.theirs = msgspec.msgpack.decode(bytes.fromhex(self._heard("info")), type=RankInfo)
        self.handle = self.agent.attach(self.theirs)

    def close(self):
        self.agent.detach(self.handle)
        self.holder.stdin.close()
        self.holder.wait(10)

    def byte_there(self, at):
        """Return a byte of the peer's memory, as the peer sees it."""
        self.holder.stdin.write(f"{at}\n")
        self.holder.stdin.flush()
        return self._heard("byte")

    def _heard(self, name):
        for line in self.holder.stdout:  # NIXL writes its log there, too
            if line.startswith(f'{{"{name}"'):
                return json.loads(line)[name]
        raise RuntimeError("the process that holds the peer's memory has ended")

    def spans(self, size):
        """Return runs of this size; they lie in opposite orders at the two ends, so that none is merged."""
        import numpy as np

        count = min(MOST, self.memory.nbytes // size)
        at = np.arange(count, dtype=np.int64) * size
        there, here = self.theirs.regions[0].base + at, self.memory.address + at[::-1]
        return np.stack((there, here, np.full_like(at, size)), axis=1)

    def move(self, operation, spans):
        """Move it; return the seconds that it took, and those of them until it was posted."""
        from pdrelay_connector.core.ports import XferOutcome

        began = time.monotonic()
        (self.agent.read if operation == "READ" else self.agent.write)(self.handle, spans)
        while not (over := self.agent.poll()):
            if time.monotonic() - began > LONGEST:
                raise RuntimeError(f"a {operation} of {len(spans)} descriptors did not end within {LONGEST:.0f} s")
        if over[0].outcome is not XferOutcome.DONE:
            raise RuntimeError(f"a {operation} of {len(spans)} descriptors failed: {over[0].reason}")
        return time.monotonic() - began, over[0].posting

    def check(self):
        """Both operations move the bytes, and not only say so: raise ``RuntimeError`` otherwise."""
        spans = self.spans(1 << 16)
        self.memory.paint([0], 1)
        self.move("READ", spans)
        if (found := self.memory.block(0, 0)[:: 1 << 12]) != b"\3" * len(found):
            raise RuntimeError("a READ that is done has not moved all bytes")
        self.memory.paint([0], 5)
        self.move("WRITE", spans)
        ends = {self.byte_there(at) for start in spans[:, 0] - spans[0, 0] for at in (int(start), int(start) + 65535)}
        if ends != {5}:
            raise RuntimeError(f"a WRITE that is done has not moved all bytes: the peer has {sorted(ends)}, not 5")


def times_of(action, seconds):
    """Return how long it took, each time, the first time aside, in which caches and connections are made."""
    action()
    marks = [time.monotonic()]
    while marks[-1] - marks[0] < seconds or len(marks) < 4:
        action()
        marks.append(time.monotonic())
    return [later - earlier for earlier, later in pairwise(marks)]


def transfer_rows(mover, seconds):
    for size in (size for size in SIZES if size <= mover.memory.nbytes):
        spans = mover.spans(size)
        for operation in OPERATIONS:
            posting = []
            took = median(times_of(lambda: posting.append(mover.move(operation, spans)[1]), seconds))  # noqa: B023
            yield {
                "what": operation, "bytes": size, "descriptors": len(spans),
                "gb_per_s": len(spans) * size / took / 1e9,
                "posting_us": median(posting) / len(spans) * 1e6,
            }  # fmt: skip


def copy_rows(device, memory, seconds):
    """What torch copies: within the device, and between it and pinned host memory; host to host, if there is none."""
    import torch

    ours, size = memory.tensor, memory.nbytes
    if not ours.is_cuda:
        pairs = {"copy host to host": (ours, torch.empty_like(ours))}
    else:
        pinned = torch.empty(ours.shape, dtype=torch.uint8, pin_memory=True)
        pairs = {
            "copy device to device": (ours, torch.empty_like(ours)),
            "copy host to device": (pinned, ours),
            "copy device to host": (ours, pinned),
        }

    def copy(source, target):
        target.copy_(source, non_blocking=True)
        if ours.is_cuda:
            torch.cuda.synchronize(device)

    for what, (source, target) in pairs.items():
        took = median(times_of(lambda: copy(source, target), seconds))  # noqa: B023
        yield {"what": what, "bytes": size, "descriptors": 1, "gb_per_s": size / took / 1e9, "posting_us": None}


def main(device, peer, seconds, mib):
    mover = Mover(device, peer, int(mib))
    try:
        mover.check()
        for rows in (copy_rows(device, mover.memory, float(seconds)), transfer_rows(mover, float(seconds))):
            for row in rows:
                print(json.dumps({"row": {"device": device, "peer": peer, **row}}), flush=True)
    finally:
        mover.close()


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(sys.argv[2], int(sys.argv[3]))
    else:
        main(*sys.argv[1:])
