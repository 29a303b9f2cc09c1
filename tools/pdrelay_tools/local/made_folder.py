"""A folder that is made once: beside its place and then renamed, so that one half written is never
found.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.processes import make_directory

FINGERPRINT = "pdrelay-model.json"  # written last: what the files were made from
Fingerprint: TypeAlias = Mapping[str, int | str]


def make_once(directory: Path, fingerprint: Fingerprint, write: Callable[[Path], None]) -> bool:
    """Have the folder written unless it is already there; True when files were written.

    Another process may do the same at the same time: whoever renames last finds the work done.
    Raises LocalError when the directory holds something else.
    """
    if is_made(directory, fingerprint):
        return False
    if directory.exists() and any(directory.iterdir()) and not (directory / FINGERPRINT).exists():
        message = (
            f"{directory} is neither empty nor a model written by pdrelay: choose another directory"
        )
        raise LocalError(message)
    make_directory(directory.parent)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write(staging)
        write_json(staging / FINGERPRINT, fingerprint)
        staging.chmod(0o755)  # mkdtemp makes it private
        try:
            staging.rename(directory)
        except OSError:  # an older model is there, or somebody was faster
            if not is_made(directory, fingerprint):
                shutil.rmtree(directory)
                staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def is_made(directory: Path, fingerprint: Fingerprint) -> bool:
    """Whether the directory was made from this very thing."""
    try:
        found: object = json.loads((directory / FINGERPRINT).read_text())
    except (OSError, ValueError):
        return False
    return found == fingerprint


def write_json(path: Path, value: object) -> None:
    """Write JSON that is the same bytes each time."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
