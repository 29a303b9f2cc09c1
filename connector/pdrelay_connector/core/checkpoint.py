"""Identifies a checkpoint by a few of its bytes, which are the same on every engine.

Two fine-tunes of one architecture have equal headers and equal file sizes, so some bytes of their
tensors are read. The choice depends on the tensors alone, not on their files: a copy that is
divided into other files is the same checkpoint.
"""

import enum
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import Meta

from pdrelay_connector.errors import UnreadableCheckpoint

# of one checkpoint: 16 MiB, in reads that a file system answers in well under a second
MOST_SLICES: Final = 4096
SLICE: Final = 4096  # bytes
MOST_OF_TENSOR: Final = 8  # slices of one tensor, if there are few tensors
MOST_HEADER: Final = 100_000_000  # bytes of a safetensors header, as its library has it
LENGTH_BYTES: Final = 8  # before the header: its length, little-endian
# Keys of a configuration that do not affect the KV, or are compared separately.
_OTHER_KEYS: Final = frozenset(
    {
        "transformers_version", "dtype", "torch_dtype", "use_cache", "id2label", "label2id",
            "architectures",
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
        "output_attentions", "output_hidden_states", "return_dict", "problem_type",
            "chunk_size_feed_forward",
    }
)  # fmt: skip
_METADATA: Final = "__metadata__"  # the header's only entry that is no tensor

# beyond it, systems and MessagePack have no numbers
_Size: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class Tensor(NamedTuple):
    """One tensor of a checkpoint, and the place of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int  # number of its file
    start: int  # offset of its first byte in that file
    length: int  # bytes


class Slice(NamedTuple):
    """Bytes of a file to read.

    ``key`` names them by their tensor, or by their place in a file that has no tensors.
    """

    key: str
    file: int
    start: int
    length: int


def header_length(first: bytes) -> int:
    """Return the length of a safetensors header, from the file's first bytes.

    Raises :exc:`~pdrelay_connector.errors.UnreadableCheckpoint`.
    """
    length = int.from_bytes(first, "little")
    if len(first) < LENGTH_BYTES or not 0 < length <= MOST_HEADER:
        raise UnreadableCheckpoint("it does not begin as a safetensors file does")
    return length


def read_header(header: bytes, file: int) -> list[Tensor]:
    """Return a file's tensors; raises :exc:`~pdrelay_connector.errors.UnreadableCheckpoint`."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop(_METADATA, None)
        tensors = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in entries.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        # ValueError: text that is not UTF-8
        raise UnreadableCheckpoint(f"its safetensors header is not valid: {exc}") from exc
    begin = LENGTH_BYTES + len(header)
    return [
        Tensor(
            name,
            entry.dtype,
            entry.shape,
            file,
            begin + entry.data_offsets[0],
            max(0, stop - start),
        )
        for name, entry in tensors.items()
        for start, stop in (entry.data_offsets,)
    ]


def choose_slices(tensors: Sequence[Tensor]) -> list[Slice]:
    """Choose slices of every tensor, or of as many tensors of each kind if there are too many.

    Tensors are of one kind if their names differ in numbers only (of layers and experts).
    """
    chosen = sorted(tensors)
    if len(chosen) > MOST_SLICES:
        chosen = _of_each_kind(chosen)
    slices_each = max(1, min(MOST_OF_TENSOR, MOST_SLICES // max(1, len(chosen))))
    return [piece for tensor in chosen for piece in _slices_of(tensor, slices_each)]


def _of_each_kind(tensors: Sequence[Tensor]) -> list[Tensor]:
    kinds: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(re.sub(r"\d+", "#", tensor.name), []).append(tensor)
    chosen: list[Tensor] = []
    rest = MOST_SLICES
    for number, kind in enumerate(sorted(kinds.values(), key=len)):
        count = min(len(kind), rest // (len(kinds) - number))
        chosen += [kind[place * len(kind) // count] for place in range(count)]
        rest -= count
    return chosen


def _slices_of(tensor: Tensor, count: int) -> list[Slice]:
    """Return one slice of each of ``count`` equal parts; the tensor's name decides the places."""
    if tensor.length <= count * SLICE:
        return [Slice(f"{tensor.name}@0", tensor.file, tensor.start, tensor.length)]
    part = tensor.length // count
    places = hashlib.blake2b(tensor.name.encode(errors="replace"), digest_size=8 * count).digest()
    offsets = [
        number * part
        + int.from_bytes(places[8 * number : 8 * number + 8], "little") % (part - SLICE + 1)
        for number in range(count)
    ]
    return [
        Slice(f"{tensor.name}@{offset}", tensor.file, tensor.start + offset, SLICE)
        for offset in offsets
    ]


def spread_slices(sizes: Sequence[int], *, head: int = 1 << 16, tail: int = 1 << 20) -> list[Slice]:
    """Choose slices of files with unknown tensors: both ends, and places at equal distances.

    A file of torch.save ends with a zip directory, which has a CRC-32 of every tensor.
    """
    count = max(1, MOST_SLICES // max(1, len(sizes)))
    slices: list[Slice] = []
    for file, size in enumerate(sizes):
        if size <= head + tail + count * SLICE:
            slices.append(Slice(f"{file}@0", file, 0, size))
            continue
        slices.append(Slice(f"{file}@0", file, 0, head))
        slices.append(Slice(f"{file}@{size - tail}", file, size - tail, tail))
        gap = (size - head - tail) // count
        places = [head + number * gap for number in range(count)]
        slices += [Slice(f"{file}@{place}", file, place, SLICE) for place in places]
    return slices


def digest_of(description: object, pieces: Sequence[tuple[str, bytes]]) -> str:
    """Return a digest of a checkpoint's description and of its slices."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.msgpack.encode(description))
    for key, content in pieces:
        digest.update(msgspec.msgpack.encode((key, content)))
    return digest.hexdigest()


def digest_config(config: Mapping[str, Any]) -> str:
    """Return a digest of the parts of a model's configuration that affect its KV."""
    return digest_of(_plain(config), ())


def _plain(value: object) -> object:
    """Return a value in MessagePack's types, without paths, and without keys that do not matter."""
    if isinstance(value, Mapping):
        items = {str(key): item for key, item in cast("Mapping[object, Any]", value).items()}
        decisive = {
            key: item
            for key, item in items.items()
            if not key.startswith("_") and key not in _OTHER_KEYS
        }
        return [(key, _plain(decisive[key])) for key in sorted(decisive)]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, cast("set[object]", value)))
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:  # MessagePack has no larger ones
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__  # its text may have an address, which differs between processes
