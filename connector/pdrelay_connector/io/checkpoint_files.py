"""Reads the bytes that identify a checkpoint from its files: at most some MiB of any size."""

import json
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from pdrelay_connector.core.checkpoint import (
    LENGTH_BYTES,
    Slice,
    Tensor,
    choose_slices,
    digest_of,
    header_length,
    read_header,
    spread_slices,
)
from pdrelay_connector.errors import UnreadableCheckpoint

WEIGHT_PATTERNS: Final = ("consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt", "*.gguf")
SAFETENSORS: Final = ".safetensors"
MOST_JSON: Final = 64 << 20  # bytes of an index, or of a configuration
MOST_TOKENIZER: Final = 64 << 20  # bytes of one of its files
_THREADS: Final = 16  # reads at the same time: a network file system takes a millisecond for each

Item = TypeVar("Item")
Result = TypeVar("Result")


def digest_weights(files: Sequence[Path]) -> str:
    """Return a digest of a checkpoint's tensors.

    Raises :exc:`~pdrelay_connector.errors.UnreadableCheckpoint`.
    """
    ordered = sorted(files, key=lambda file: file.name)
    with _reading(ordered) as descriptors:
        if all(file.suffix == SAFETENSORS for file in ordered):
            return _digest_tensors(descriptors)
        sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
        return digest_of(sizes, _read_slices(descriptors, spread_slices(sizes)))


def digest_whole(files: Sequence[Path]) -> str:
    """Return a digest of small files' names and contents; raises as :func:`digest_weights`."""
    with _reading(files) as descriptors:
        pieces = [
            (file.name, _read(descriptor, 0, MOST_TOKENIZER))
            for file, descriptor in zip(files, descriptors, strict=True)
        ]
    return digest_of([name for name, _ in pieces], pieces)


def weight_files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files of the first pattern that matches any, without those not in the index.

    As vLLM's loader does (``model_executor/model_loader/default_loader.py``).
    """
    for pattern in patterns:
        files = sorted(
            file for file in folder.glob(pattern) if file.is_file() and not _is_of_training(file)
        )
        if files:
            prefix = "consolidated" if pattern.startswith("consolidated") else "model"
            listed = set[str]()
            if pattern.endswith(SAFETENSORS):
                listed = _listed(folder / f"{prefix}{SAFETENSORS}.index.json")
            return [file for file in files if file.name in listed] or files
    return []


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; raises :exc:`~pdrelay_connector.errors.UnreadableCheckpoint`."""
    try:
        with file.open("rb") as opened:
            content = json.loads(opened.read(MOST_JSON))
    except (OSError, ValueError, RecursionError) as exc:
        raise UnreadableCheckpoint(f"{file} cannot be read: {exc}") from exc
    if not isinstance(content, dict):
        raise UnreadableCheckpoint(f"{file} is no JSON object")
    entries = cast("dict[str, Any]", content)
    try:
        "".join(entries).encode()
    except UnicodeEncodeError as exc:  # half a surrogate pair is valid JSON but not text
        raise UnreadableCheckpoint(f"{file} has a name that is no text: {exc}") from exc
    return entries


def stamp_of(files: Iterable[Path]) -> tuple[tuple[str, int, int, int], ...]:
    """Return what changes when a file is replaced or written: size, inode and time.

    An absent file is left out.
    """
    stamps: list[tuple[str, int, int, int]] = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue
        stamps.append((file.name, status.st_size, status.st_ino, status.st_mtime_ns))
    return tuple(stamps)


def _digest_tensors(descriptors: Sequence[int]) -> str:
    def tensors_of(number: int) -> list[Tensor]:
        length = header_length(_read(descriptors[number], 0, LENGTH_BYTES))
        return read_header(_read(descriptors[number], LENGTH_BYTES, length), number)

    tensors = [
        tensor
        for tensors_of_file in _in_parallel(tensors_of, range(len(descriptors)))
        for tensor in tensors_of_file
    ]
    description = sorted((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    return digest_of(description, _read_slices(descriptors, choose_slices(tensors)))


def _read_slices(descriptors: Sequence[int], slices: Sequence[Slice]) -> list[tuple[str, bytes]]:
    contents = _in_parallel(
        lambda piece: _read(descriptors[piece.file], piece.start, piece.length), slices
    )
    return [(piece.key, content) for piece, content in zip(slices, contents, strict=True)]


def _in_parallel(read: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    with ThreadPoolExecutor(_THREADS, "pdrelay-checkpoint") as pool:
        return list(pool.map(read, items))


def _read(descriptor: int, start: int, length: int) -> bytes:
    content = b""
    try:
        while len(content) < length and (
            more := os.pread(descriptor, length - len(content), start + len(content))
        ):
            content += more
    except OSError as exc:
        raise UnreadableCheckpoint(f"it cannot be read: {exc}") from exc
    return content


@contextmanager
def _reading(files: Sequence[Path]) -> Generator[list[int]]:
    with ExitStack() as opened:
        descriptors: list[int] = []
        for file in files:
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as exc:
                raise UnreadableCheckpoint(f"{file} cannot be read: {exc}") from exc
            opened.callback(os.close, descriptor)
            descriptors.append(descriptor)
        yield descriptors


def _is_of_training(file: Path) -> bool:
    """Whether vLLM does not load a file that has the name of one of weights."""
    return file.stem in (
        "training_args",
        "optimizer",
        "scheduler",
        "scaler",
        "rng_state",
        "trainer_state",
    )


def _listed(index: Path) -> set[str]:
    """Return the files that an index names; none without an index."""
    if not index.is_file():
        return set()
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        return set()
    return {str(name) for name in cast("dict[str, object]", weight_map).values()}
