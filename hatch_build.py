"""Compiles what every request and every token goes through, with mypyc: the same modules, as C.

A wheel is plain Python unless it is asked for: ``HATCH_BUILD_HOOK_ENABLE_CUSTOM=true pip wheel .`` needs a C compiler
and three minutes. The sources are in the wheel all the same, beside what was made of them. See docs/performance.md.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = Path("proxy", "xpyd_proxy")
_OPTIONS = ("--config-file=", "--ignore-missing-imports", "--follow-imports=silent")  # of mypy
# A C file for each module. In one file, as `python -m mypyc` writes them, GCC needs three times the time and 1.3 GB; a
# request takes as many instructions.
_SETUP = """import sys
from mypyc.build import mypycify
from setuptools import setup
asked, sys.argv[1:] = sys.argv[3:], sys.argv[1:3]
setup(name="compiled", ext_modules=mypycify(asked, opt_level="3", debug_level="0", multi_file=True))
"""


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts compiled modules into a wheel; an editable installation has none, for they would hide what is edited."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile a copy of the package, and add what came of it."""
        if version != "standard":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="xpyd-compile-"))
        try:
            shutil.copytree(Path(self.root) / _PACKAGE, self._folder / _PACKAGE.name)
            _compile(self._folder, self._modules())
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        for made in self._folder.glob("**/*.so"):
            place = made.relative_to(self._folder)
            if place.parts[0] != "build":
                build_data["force_include"][str(made)] = str(place)
        build_data["infer_tag"], build_data["pure_python"] = True, False

    def finalize(self, version: str, _build_data: dict[str, Any], _artifact: str) -> None:
        """Clean up."""
        if version == "standard":
            shutil.rmtree(self._folder)

    def _modules(self) -> list[str]:
        """Return the modules of the folders that the project names; one that is not there is a mistake."""
        folders = [self._folder / _PACKAGE.name / name for name in self.config["folders"]]
        if missing := [str(folder) for folder in folders if not folder.is_dir()]:
            raise FileNotFoundError(f"pyproject.toml has folders compiled that do not exist: {', '.join(missing)}")
        found = [path for folder in folders for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        return [str(path.relative_to(self._folder)) for path in found]


def _compile(folder: Path, modules: list[str]) -> None:
    """Run mypyc; what it complains about is the error. What the modules import is none of its business."""
    (folder / "setup.py").write_text(_SETUP)
    command = [sys.executable, "setup.py", "build_ext", "--inplace", *_OPTIONS, *modules]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"mypyc could not compile the router:\n{done.stdout.decode(errors='replace')}")
