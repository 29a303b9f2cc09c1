"""What runs here: the version, the commit it was made from, and whether the request path is
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
# in a compiled wheel this one is compiled with all others
_COMPILED_MODULE: Final = "pdrelay_proxy.core.raw_json"


@dataclass(frozen=True, slots=True)
class Build:
    """What runs here."""

    version: str
    commit: str | None  # None: it cannot be known
    is_compiled: bool  # docs/performance.md

    def __str__(self) -> str:
        kind = "compiled" if self.is_compiled else "plain Python"
        return f"{self.version} (commit {self.commit or 'unknown'}, {kind})"


@cache
def find_build() -> Build:
    """Find out what runs here; neither the version nor the commit changes while it runs."""
    try:
        version = metadata.version("pdrelay")
    except metadata.PackageNotFoundError:  # the folder is on the path, and nothing was installed
        version = "unknown"
    spec = importlib.util.find_spec(_COMPILED_MODULE)
    is_compiled = spec is not None and not str(spec.origin).endswith(".py")
    return Build(version, find_commit(_PACKAGE), is_compiled)


def find_commit(package: Path) -> str | None:
    """Return the commit of a package: of the checkout it lies in, of its wheel, or of the URL that
    pip had it from.
    """
    checkout = package.parents[1]
    if (checkout / ".git").exists():
        return _checked_out(checkout)
    with suppress(OSError):
        return (package / _COMMIT_FILE).read_text(encoding="ascii").strip()
    return _fetched()


def _checked_out(checkout: Path) -> str | None:
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
        done = subprocess.run(
            argv, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        # there is no git, or the checkout belongs to another user
        return None
    return done.stdout.strip() or None


def _fetched() -> str | None:
    """Return the commit that pip noted when it installed from a repository's URL (PEP 610)."""
    with suppress(metadata.PackageNotFoundError, ValueError, LookupError, TypeError):
        noted = metadata.distribution("pdrelay").read_text("direct_url.json")
        if noted is not None:
            return str(json.loads(noted)["vcs_info"]["commit_id"])[:12]
    return None
