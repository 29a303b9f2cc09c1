"""Notes the commit in a wheel, and compiles what every request and every token goes through: the
same modules, as C.

A wheel is plain Python unless it is asked for: ``HATCH_BUILD_HOOK_ENABLE_CUSTOM=true pip wheel .``
needs a C compiler and three minutes. The sources are in the wheel all the same, beside what was
made of them. See docs/performance.md.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = Path("proxy", "pdrelay_proxy")
_COMPILES = "HATCH_BUILD_HOOK_ENABLE_CUSTOM"  # set to true in the environment
_COMMIT_FILE = "commit.txt"  # proxy/pdrelay_proxy/io/build.py reads it
_OPTIONS = ("--config-file=", "--ignore-missing-imports", "--follow-imports=silent")  # of mypy
# A C file for each module. In one file, as `python -m mypyc` writes them, GCC needs three times the
# time and 1.3 GB; a request takes as many instructions.
_SETUP = """import sys
from mypyc.build import mypycify
from setuptools import setup
asked, sys.argv[1:] = sys.argv[3:], sys.argv[1:3]
setup(name="compiled", ext_modules=mypycify(asked, opt_level="3", debug_level="0", multi_file=True))
"""


class WheelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds to a wheel; an editable installation gets nothing: it would hide what is edited, and the
    commit changes.
    """

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what compiling needs, if this compiles."""
        return list(self.config["compiler"]) if _is_compiled() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Note the commit; compile a copy of the package, and add what came of it."""
        if version != "standard":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="pdrelay-build-"))
        try:
            if commit := _commit(Path(self.root)):
                (self._folder / _COMMIT_FILE).write_text(f"{commit}\n")
                build_data["force_include"][str(self._folder / _COMMIT_FILE)] = (
                    f"{_PACKAGE.name}/{_COMMIT_FILE}"
                )
            if _is_compiled():
                self._compile(build_data)
        except BaseException:
            shutil.rmtree(self._folder)
            raise

    def finalize(self, version: str, _build_data: dict[str, Any], _artifact: str) -> None:
        """Clean up."""
        if version == "standard":
            shutil.rmtree(self._folder)

    def _compile(self, build_data: dict[str, Any]) -> None:
        shutil.copytree(Path(self.root) / _PACKAGE, self._folder / _PACKAGE.name)
        _compile(self._folder, self._modules())
        for made in self._folder.glob("**/*.so"):
            place = made.relative_to(self._folder)
            if place.parts[0] != "build":
                build_data["force_include"][str(made)] = str(place)
        build_data["infer_tag"], build_data["pure_python"] = True, False

    def _modules(self) -> list[str]:
        """Return the modules of the folders that the project names; one that is not there is a
        mistake.
        """
        folders = [self._folder / _PACKAGE.name / name for name in self.config["folders"]]
        if missing := [str(folder) for folder in folders if not folder.is_dir()]:
            raise FileNotFoundError(
                f"pyproject.toml has folders compiled that do not exist: {', '.join(missing)}"
            )
        found = [
            path
            for folder in folders
            for path in sorted(folder.glob("*.py"))
            if path.name != "__init__.py"
        ]
        return [str(path.relative_to(self._folder)) for path in found]


def _is_compiled() -> bool:
    return os.environ.get(_COMPILES, "").lower() in ("true", "1")


def _commit(root: Path) -> str | None:
    """Return the commit that is built: REVISION, for a builder without git, or that of the
    checkout.
    """
    if given := os.environ.get("REVISION", ""):
        return given[:12] if given != "unknown" else None
    if not (root / ".git").exists():  # a folder inside of another project's checkout
        return None
    argv = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return (
            subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip() or None
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(folder: Path, modules: list[str]) -> None:
    """Run mypyc; what it complains about is the error.

    What the modules import is none of its business.
    """
    (folder / "setup.py").write_text(_SETUP)
    command = [sys.executable, "setup.py", "build_ext", "--inplace", *_OPTIONS, *modules]
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"mypyc could not compile the router:\n{done.stdout.decode(errors='replace')}"
        )
