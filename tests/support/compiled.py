"""The package with compiled modules, as the router's image has it: made once for its sources, in .pdrelay/compiled."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".pdrelay/compiled"
_ENABLED = "HATCH_BUILD_HOOK_ENABLE_CUSTOM"
_KEPT_MOST = 2  # older ones: somebody may still use them
_TOOLS = ("mypy", "setuptools", "msgspec", "httptools")  # what is made depends on them


class NoCompiler(Exception):
    """This machine cannot compile; the message says what is missing."""


def modules():
    """Return the files that are compiled."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    folders = [ROOT / "proxy/pdrelay_proxy" / name for name in hook["folders"]]
    return [path for folder in folders for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]


def compiled():
    """Return the folder with the package, for PYTHONPATH; takes three minutes if it is not there yet.

    Raises:
        NoCompiler: there is no C compiler, or no header files of Python.
    """
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise NoCompiler(f"there is no C compiler: Python asks for {compiler}")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        raise NoCompiler(f"there is no Python.h in {sysconfig.get_path('include')}: install the header files of Python")
    folder = KEPT / _fingerprint()
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            for old in sorted(KEPT.glob("*/"), key=lambda path: path.stat().st_mtime)[:-_KEPT_MOST]:
                shutil.rmtree(old)
            _make(folder)
    return folder


def compiled_wheel():
    """Return the wheel that the folder was unpacked from; raises NoCompiler as ``compiled`` does."""
    (found,) = (compiled() / "wheels").glob("*.whl")
    return found


def main():
    """Make it now, if it can be made here: whoever asks later finds it."""
    try:
        print(f"The compiled router is in {compiled()}.")
    except NoCompiler as exc:
        print(f"The router is not compiled: {exc}")


def _fingerprint():
    found = hashlib.sha256(f"{sys.version} {[version(name) for name in _TOOLS]} with its wheel".encode())
    for path in (ROOT / "pyproject.toml", ROOT / "hatch_build.py", *sorted(ROOT.glob("proxy/pdrelay_proxy/**/*.py"))):
        found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _make(folder):
    making = folder.with_suffix(".making")
    wheels = making / "wheels"
    wheel = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*wheel, "--no-build-isolation", "--wheel-dir", wheels, ROOT],
        env=os.environ | {_ENABLED: "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"the package could not be compiled:\n{done.stdout}{done.stderr}"
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as found:
        found.extractall(making)
    making.rename(folder)


if __name__ == "__main__":
    main()
