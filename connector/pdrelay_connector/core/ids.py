"""Types for ids that must not be mixed up. They cost nothing at run time."""

from typing import NamedTuple, NewType

EngineId = NewType("EngineId", str)
# vLLM's internal id, different on P and on D for the same client request
RequestId = NewType("RequestId", str)
ConnId = NewType("ConnId", int)  # one control connection, as this process numbers them
XferId = NewType("XferId", int)
BlockId = NewType("BlockId", int)
# one copy between a device and host memory, as its worker numbers them
CopyId = NewType("CopyId", int)
# one staged part of a request's KV, as the scheduler that staged it numbers them
PartId = NewType("PartId", int)


class Address(NamedTuple):
    """Where an engine's side channel listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EngineEndpoint(NamedTuple):
    """An engine and where its side channel listens."""

    engine: EngineId
    address: Address
