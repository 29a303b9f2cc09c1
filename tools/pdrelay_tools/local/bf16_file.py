"""Writes safetensors files of bf16: numpy has no bf16, and importing torch takes seconds."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Bf16Tensor:
    """A tensor; its values are computed when it is written, as all are 1 GB of float32."""

    name: str
    shape: Sequence[int]
    values: Callable[[], NDArray[np.float32]]


def write_bf16_file(path: Path, tensors: Sequence[Bf16Tensor]) -> None:
    """Write the tensors in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + 2 * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            values = tensor.values()
            if values.shape != tuple(tensor.shape):
                raise ValueError(
                    f"{tensor.name} has the shape {values.shape}, and {tuple(tensor.shape)} was "
                    f"announced"
                )
            file.write(_bf16_bytes(values))


def _bf16_bytes(values: NDArray[np.float32]) -> bytes:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # to nearest even, like torch
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()
