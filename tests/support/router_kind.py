"""Which router stands before real engines: the compiled one, as the router's image has it, or the plain one.

``PDRELAY_TEST_ROUTER=plain`` or ``compiled`` chooses. If it is not set, it is the compiled one wherever there is a C
compiler.
"""

import functools
import os
from pathlib import Path

from support.compiled import NoCompiler, compiled

CHOICE = "PDRELAY_TEST_ROUTER"
KINDS = ("plain", "compiled")


def environment() -> dict[str, str]:
    """Return what a router's process needs in its environment to be of that kind."""
    folder, _ = _chosen(os.environ.get(CHOICE, ""))
    if folder is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def said() -> str:
    """Return which kind it is, and why, in one line; compiles it if that is not done yet."""
    return _chosen(os.environ.get(CHOICE, ""))[1]


@functools.cache  # one session has one router, even if somebody edits its sources meanwhile
def _chosen(asked: str) -> tuple[Path | None, str]:
    if asked not in ("", *KINDS):
        raise ValueError(f"{CHOICE} is {asked!r}: it must be one of {', '.join(KINDS)}")
    if asked == "plain":
        return None, f"plain Python ({CHOICE}=plain)"
    try:
        folder = compiled()
    except NoCompiler as exc:
        if asked:
            raise
        return None, f"plain Python, and not compiled as in its image: {exc}"
    return folder, f"compiled ({folder.name})"
