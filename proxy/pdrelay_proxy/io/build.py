"""The version of the router, the commit it was made from, and whether the request path is
compiled.
"""

import importlib.util
import json
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parents[1]
_COMMIT_FILE: Final = "commit.txt"  # hatch_build.py puts it into a wheel
_GIT_TIMEOUT_S: Final = 5.0
# a compiled wheel has all compiled modules, and so this one
_COMPILED_MODULE: Final = "pdrelay_proxy.core.raw_json"


@dataclass(frozen=True, slots=True)
class Build:
    """The running build."""

    version: str
    commit: str | None  # None: unknown
    is_compiled: bool  # docs/performance.md

    def __str__(self) -> str:
        kind = "compiled" if self.is_compiled else "plain Python"
        return f"{self.version} (commit {self.commit or 'unknown'}, {kind})"


@cache
def find_build() -> Build:
    """Return the running build; neither the version nor the commit changes while it runs."""
    try:
        version = metadata.version("pdrelay")
    except metadata.PackageNotFoundError:  # the folder is on the path, and nothing was installed
        version = "unknown"
    spec = importlib.util.find_spec(_COMPILED_MODULE)
    is_compiled = spec is not None and not str(spec.origin).endswith(".py")
    return Build(version, find_commit(_PACKAGE), is_compiled)


def find_commit(package: Path) -> str | None:
    """Return the commit of a package: of its checkout, its wheel, or the URL of pip."""
    checkout = package.parents[1]
    if (checkout / ".git").exists():
        return _commit_of_checkout(checkout)
    with suppress(OSError):
        return (package / _COMMIT_FILE).read_text(encoding="ascii").strip()
    return _commit_from_pip()


def _commit_of_checkout(checkout: Path) -> str | None:
    argv = [
        "git",
        "-C",
        str(checkout),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        result = subprocess.run(
            argv, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        # there is no git, or the checkout belongs to another user
        return None
    return result.stdout.strip() or None


def _commit_from_pip() -> str | None:
    """Return the commit that pip recorded when it installed from a repository's URL (PEP 610)."""
    with suppress(metadata.PackageNotFoundError, ValueError, LookupError, TypeError):
        direct_url = metadata.distribution("pdrelay").read_text("direct_url.json")
        if direct_url is not None:
            return str(json.loads(direct_url)["vcs_info"]["commit_id"])[:12]
    return None
