"""Memory that NIXL moves: of the host by numpy, or of any device by torch, with the same few operations.

``host`` needs no torch, whose import takes seconds. ``cpu`` and ``cuda:0`` run the same lines: what is shown on the
one is shown for the other, except for the device itself.
"""

from functools import cached_property

import numpy as np

HOST = "host"


def place_of(device):
    """Return NIXL's name of the memory, and the number of the device."""
    kind, _, number = device.partition(":")
    return ("VRAM", int(number or 0)) if kind == "cuda" else ("DRAM", 0)


def binding_of(device):
    """Return what makes a device current on a thread; None: it is the host."""
    if place_of(device)[0] == "DRAM":
        return None

    def bind():
        import torch

        torch.cuda.set_device(device)
        torch.zeros(1, device=device)

    return bind


def allocate(device, shape):
    """Return memory of this shape in bytes, all 0."""
    return HostMemory(shape) if device == HOST else TensorMemory(device, shape)


class HostMemory:
    """numpy's."""

    def __init__(self, shape):
        self.array = np.zeros(shape, dtype=np.uint8)
        self.shape = self.array.shape
        self.nbytes = self.array.nbytes
        self.address = self.array.ctypes.data

    def fill(self, seed):
        self.array[:] = np.random.default_rng(seed).integers(0, 256, self.shape, dtype=np.uint8)

    def paint(self, blocks, value):
        """Set all bytes of these blocks, which are the second dimension."""
        self.array[:, blocks] = value

    def block(self, layer, block):
        return self.array[layer, block].tobytes()


class TensorMemory:
    """torch's, on a device. What is written here is there when a call returns, as NIXL knows no streams."""

    def __init__(self, device, shape):
        self.tensor = self._torch.zeros(shape, dtype=self._torch.uint8, device=device)
        self.shape, self.nbytes, self.address = tuple(shape), self.tensor.nbytes, self.tensor.data_ptr()
        self._wait()

    @cached_property
    def _torch(self):
        import torch

        return torch

    def fill(self, seed):
        drawn = np.random.default_rng(seed).integers(0, 256, self.shape, dtype=np.uint8)
        self.tensor.copy_(self._torch.from_numpy(drawn))
        self._wait()

    def paint(self, blocks, value):
        self.tensor[:, blocks] = value
        self._wait()

    def block(self, layer, block):
        return self.tensor[layer, block].cpu().numpy().tobytes()

    def _wait(self):
        if self.tensor.is_cuda:
            self._torch.cuda.synchronize(self.tensor.device)
