"""Memory of the doctor's own that NIXL moves: nothing of an engine is touched."""

import mmap
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from pdrelay_connector.core.doctor.examination import EndFacts
from pdrelay_connector.core.messages import RankInfo, Region
from pdrelay_connector.doctor.machine import ucx_version
from pdrelay_connector.errors import SettingsError
from pdrelay_connector.io.nixl import HOST_MEMORY, NixlTransferAgent, make_agent, register
from pdrelay_connector.settings import Settings


@dataclass(frozen=True, slots=True)
class Scratch:
    """Registered memory, and the agent that reaches it; it must live as long as transfers may."""

    memory: Any
    nixl: Any
    agent: NixlTransferAgent
    info: RankInfo


def open_scratch(
    name: str, size: int, device: str, settings: Settings, facts: EndFacts
) -> tuple[Scratch, EndFacts]:
    """Allocate and register ``size`` bytes; return them, and the facts with what NIXL has shown.

    ``device``: ``cpu`` or ``cuda:N``. Raises :exc:`~pdrelay_connector.errors.SettingsError` or
    ``TransferError``.
    """
    memory, address, kind, number = _allocate(size, device)
    backends = {backend.name: backend.parameters for backend in settings.backends}
    nixl = make_agent(
        name,
        progress_delay_us=settings.progress_delay_us,
        backends=backends,
        bind=None if kind == HOST_MEMORY else partial(_bind, number),
    )
    start = time.monotonic()
    metadata = register(nixl, kind, number, [(address, size)])
    seconds = time.monotonic() - start
    region = Region(address, 1, 1, 1, size, size, size, size)
    info = RankInfo(0, 1, metadata, kind, number, (region,))
    facts = msgspec.structs.replace(
        facts, ucx=ucx_version(), memory=kind, memory_bytes=size, registration_seconds=seconds
    )
    return Scratch(memory, nixl, NixlTransferAgent(nixl, kind, number), info), facts


def _bind(number: int) -> None:
    """Make a GPU current on the thread that calls this."""
    import torch  # noqa: PLC0415 (as below)

    torch.cuda.set_device(number)
    torch.zeros(1, device=f"cuda:{number}")  # with its context


def _allocate(size: int, device: str) -> tuple[Any, int, Any, int]:
    if device == "cpu":
        memory = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
        # the pages are there before they are registered, as those of a cache are
        memory[:: mmap.PAGESIZE] = 1
        return memory, memory.ctypes.data, "DRAM", 0
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise SettingsError(f"--device is {device!r}; it must be cpu, cuda or cuda:N")
    try:
        import torch  # noqa: PLC0415 (only memory of a GPU needs it)

        tensor = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{number or 0}")
        torch.cuda.synchronize()
    except (ImportError, RuntimeError, AssertionError) as exc:  # AssertionError: torch without CUDA
        raise SettingsError(
            f"--device is {device!r}, and torch has no such device here: {exc}"
        ) from exc
    return tensor, int(tensor.data_ptr()), "VRAM", int(number or 0)
