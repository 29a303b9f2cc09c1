"""The programs of others: each in an environment of its own under .pdrelay/venvs, with what its lock names."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

from support import try_versions as versions

ROOT = Path(__file__).parents[2]
LOCKS = Path(__file__).with_name("locks")
KEPT = ROOT / ".pdrelay/venvs"
VLLM_ROUTER = ROOT / "benchmarks/router/requirements-peer.txt"  # its benchmark has the same
STAMP = "locked.txt"  # in a folder: what it was made from
PIP = ("-m", "pip", "-q", "--disable-pip-version-check")
VLLM = "0.32.0"  # whose demonstration proxies are tried


def version_of(name: str, package: str) -> str:
    """Return the version of a package in a lock."""
    lines = _lock(name).read_text().splitlines()
    return next(line.split()[0].partition("==")[2] for line in lines if line.startswith(f"{package}=="))


def environment(name: str) -> Path:
    """Return the folder of the programs of an environment, made anew if its lock has changed."""
    lock = _lock(name)
    folder = KEPT / name
    if not _is_made(folder, lock.read_text()):
        venv.create(folder, clear=True, symlinks=True, with_pip=True)
        python = folder / "bin/python"
        _run([python, *PIP, "install", "--no-deps", "--require-hashes", "-r", lock])
        (folder / STAMP).write_text(lock.read_text())
    return folder / "bin"


def beside_vllm(name: str, vllm: str) -> tuple[Path, Path]:
    """Return the Python of an environment with a version of vLLM, and a folder of packages for its PYTHONPATH.

    The packages come without what they need: the engine's environment has it.
    """
    python = versions.environment(vllm)
    lock = _lock(name)
    folder = KEPT / name
    if not _is_made(folder, lock.read_text()):
        shutil.rmtree(folder, ignore_errors=True)
        _run([python, *PIP, "install", "--no-deps", "--require-hashes", "--target", folder, "-r", lock])
        (folder / STAMP).write_text(lock.read_text())
    return python, folder


def repository(url: str, commit: str) -> Path:
    """Return the folder with a repository's files at a commit. Git's own setting url.BASE.insteadOf names a mirror."""
    folder = KEPT / f"{Path(url).name}-sources"
    if not _is_made(folder, commit):
        shutil.rmtree(folder, ignore_errors=True)
        _run(["git", "init", "-q", folder])
        _run(["git", "-C", folder, "fetch", "-q", "--depth", "1", url, commit])
        _run(["git", "-C", folder, "checkout", "-q", commit])
        (folder / STAMP).write_text(commit)
    return folder


def vllm_sources() -> Path:
    """Return the folder with vLLM's source distribution, which has what no wheel has: examples and tests.

    Pip asks for its metadata, for which it imports PyTorch: this Python has that, the environment has the other tools.
    """
    lock = LOCKS / "vllm-sources.txt"
    folder = KEPT / "vllm-sources"
    made = folder / f"vllm-{VLLM}"
    if not _is_made(folder, lock.read_text()):
        shutil.rmtree(folder, ignore_errors=True)
        tools = folder / "tools"
        install = ["install", "--no-deps", "--require-hashes", "--target", tools]
        _run([sys.executable, *PIP, *install, "-r", LOCKS / "vllm-tools.txt"])
        quiet = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VLLM, "PYTHONPATH": str(tools)}
        download = ["download", "--no-deps", "--require-hashes", "--no-binary", ":all:", "--no-build-isolation"]
        _run([sys.executable, *PIP, *download, "-d", folder, "-r", lock], quiet)
        with tarfile.open(folder / f"{made.name}.tar.gz") as packed:
            packed.extractall(folder, filter="data")
        (folder / STAMP).write_text(lock.read_text())
    return made


def _lock(name: str) -> Path:
    if name == "vllm-router":
        return VLLM_ROUTER
    (lock,) = LOCKS.rglob(f"{name}.txt")
    return lock


def _is_made(folder: Path, stamp: str) -> bool:
    return (folder / STAMP).exists() and (folder / STAMP).read_text() == stamp


def _run(argv: list[object], more: dict[str, str] | None = None) -> None:
    subprocess.run([*map(str, argv)], check=True, cwd=ROOT, env={**os.environ, **(more or {})})
