"""How many instructions a part of a program takes: other load on the machine changes nothing.

Needs valgrind, its header files and a C compiler.
"""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

_LIBRARY = "PDRELAY_BENCH_SWITCH"
_SWITCH = """
#include <valgrind/callgrind.h>
void on(void) { CALLGRIND_START_INSTRUMENTATION; }
void off(void) { CALLGRIND_STOP_INSTRUMENTATION; }
"""


class Switch:
    """Tells valgrind when to count: until then a program runs several times as fast.

    Without valgrind it does nothing.
    """

    def __init__(self):
        path = os.environ.get(_LIBRARY)
        library = ctypes.CDLL(path) if path else None
        self.on, self.off = (library.on, library.off) if library else (lambda: None, lambda: None)


def counted(*arguments, profile="/dev/null", **environment):
    """Return the instructions that a Python program runs while its switch is on."""
    with tempfile.TemporaryDirectory(prefix="pdrelay-") as folder:
        library = Path(folder, "switch.so")
        compiler = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", library]
        subprocess.run(compiler, input=_SWITCH, text=True, check=True)
        argv = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        argv += [f"--callgrind-out-file={profile}", sys.executable, *arguments]
        env = os.environ | {"PYTHONHASHSEED": "0", _LIBRARY: str(library)} | environment
        done = subprocess.run(
            argv, env=env, capture_output=True, text=True, check=False, timeout=900
        )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not found:
        sys.exit(done.stdout + done.stderr[-3000:])
    return int(found[1])
