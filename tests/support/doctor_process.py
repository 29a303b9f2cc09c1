"""``pdrelay doctor`` in a process of its own, with a clock that may be wrong.

``python -m support.doctor_process AHEAD ARGUMENT...``: the clock of that end is ``AHEAD`` seconds ahead.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

LONG = 120.0  # s: only reached when something is wrong
QUICK = ("--seconds", "0.1", "--memory-mib", "8", "--timeout", "15")  # the last: on a machine with other load


def _start(arguments, *, prefix=(), ahead=0.0, env=None):
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(tests), os.environ.get("PYTHONPATH")]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "PDRELAY_", "VLLM_"))}
    command = [*prefix, sys.executable, "-m", "support.doctor_process", str(ahead), *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, "PYTHONPATH": path, **(env or {})},
    )


@contextlib.contextmanager
def listening(*arguments, **options):
    """Give ``host:port`` of a waiting end."""
    process = _start(["listen", "--memory-mib", "8", *arguments], **options)
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on "), (line, process.poll() is not None and process.stderr.read())
        yield line.split()[2].rstrip(";")
    finally:
        process.kill()
        process.communicate()


def examined(*arguments, **options):
    """Examine something; return the exit code, the first finding of each name, and all facts."""
    process = _start([*QUICK, "--json", *arguments], **options)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode in (0, 1), err
    report = json.loads(out)
    findings = {}
    for finding in report["findings"]:
        findings.setdefault(finding["name"], SimpleNamespace(**finding))
    return SimpleNamespace(code=process.returncode, findings=findings, report=report, stderr=err)


def main(ahead, *arguments):
    sys.modules["torch"] = None  # nixl asks it for its CUDA version, 5 s of CPU later
    from pdrelay_connector.doctor.command import main as doctor

    return doctor(arguments, wall=lambda: time.time() + float(ahead))  # noqa: TID251


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
