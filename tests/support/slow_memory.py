"""A link on which READ is slower than WRITE, or the other way round, under the real NIXL and UCX.

It stands for GPUs whose reads over PCIe are slow. A network cannot: over TCP the bytes of both go from the prefill to
the decode engine, and UCX uses one connection for them. So the link is shared memory, of which UCX moves every byte
with ``process_vm_readv`` and ``process_vm_writev``, and these take as long as the bytes would at a rate. A library that
is loaded before libc does it (slow_memory.c), in processes that are started, not forked, with the variables of
:func:`slow`.
"""

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

COMPILER = shutil.which("cc")
NEEDED = "a C compiler for a slow link"


def slow(**megabytes_per_second):
    """Return the variables of a process with these rates, ``READ=40`` say; an operation that is not named is fast."""
    rates = {f"PDRELAY_TEST_{operation}_MB_PER_S": f"{rate:g}" for operation, rate in megabytes_per_second.items()}
    return {"UCX_TLS": "cma,tcp", "LD_PRELOAD": str(_library()), **rates}


@functools.cache
def _library():
    folder = tempfile.mkdtemp(prefix="pdrelay-slow-memory-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = Path(folder, "slow_memory.so")
    source = Path(__file__).with_suffix(".c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True)
    return made
