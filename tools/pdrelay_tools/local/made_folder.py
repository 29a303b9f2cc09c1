"""A folder that is written once: under another name, then renamed, so never half done."""

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

    Two processes may do it at the same time: the second one to rename keeps the first one's files.
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
        except OSError:  # an older model is there, or another process was faster
            if not is_made(directory, fingerprint):
                shutil.rmtree(directory)
                staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def is_made(directory: Path, fingerprint: Fingerprint) -> bool:
    """Tell whether the directory was made with this fingerprint."""
    try:
        written: object = json.loads((directory / FINGERPRINT).read_text())
    except (OSError, ValueError):
        return False
    return written == fingerprint


def write_json(path: Path, value: object) -> None:
    """Write JSON with sorted keys, so that equal values are equal bytes."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
