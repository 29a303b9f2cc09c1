"""The messages of ``pdrelay doctor``, inside ``Examination`` messages of the side channel."""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pdrelay_connector.core import messages
from pdrelay_connector.core.messages import MemoryKind
from pdrelay_connector.errors import ProtocolViolation

ShortText: TypeAlias = Annotated[str, Meta(max_length=255)]
LongText: TypeAlias = Annotated[str, Meta(max_length=1024)]
ShortTexts: TypeAlias = Annotated[tuple[ShortText, ...], Meta(max_length=64)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=3600)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 48)]
Operation: TypeAlias = Literal["READ", "WRITE"]

LONGEST_MEASUREMENT = 60.0  # s that one end may have the other one measure


class EndFacts(msgspec.Struct, frozen=True):
    """The facts of one end. Empty text or 0: not known there."""

    host: ShortText
    pdrelay: ShortText = ""  # versions
    nixl: ShortText = ""
    ucx: ShortText = ""
    vllm: ShortText = ""
    address: ShortText = ""  # IP address of the interface that leads to the other end
    interface: ShortText = ""
    mtu: Count = 0
    rdma: ShortTexts = ()  # active ports, as UCX names them
    machine: ShortText = ""  # boot id of the kernel: equal in all containers of one machine
    ipc_namespace: ShortText = ""
    pid_namespace: ShortText = ""
    shared_memory: Count = 0  # free bytes of /dev/shm
    environment: ShortTexts = ()  # UCX_... and NIXL_... variables, as NAME=value
    memory: MemoryKind = "DRAM"  # of the measurements
    memory_bytes: Count = 0
    registration_seconds: Seconds = 0.0

    def variable(self, name: str) -> str | None:
        """Return an environment variable of that end; None if it is not set."""
        pairs = (text.partition("=") for text in self.environment)
        return next((value for key, _, value in pairs if key == name), None)


class Measurement(msgspec.Struct, frozen=True):
    """What one operation of one end moved, and how fast."""

    operation: Operation
    block_bytes: Count
    failure: LongText = ""  # why there are no numbers
    bytes: Count = 0  # that the transfers of the throughput moved together
    seconds: Seconds = 0.0  # that they took together
    descriptors: Count = 0
    posting_seconds: Seconds = 0.0  # of these, spent in posting
    latency_seconds: Seconds = 0.0  # median of single small transfers
    meeting_seconds: Seconds = 0.0  # the first transfer, which opens UCX's connection

    @property
    def rate(self) -> float:
        """GB/s (10^9 bytes)."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


class Introduction(msgspec.Struct, frozen=True, tag="introduction"):
    """The first message of the dialling end, and the answer to it."""

    facts: EndFacts


class ClockProbe(msgspec.Struct, frozen=True, tag="clock_probe"):
    """Asks for the time."""


class ClockReply(msgspec.Struct, frozen=True, tag="clock_reply"):
    """The time, s since the epoch."""

    wall: float


class DialBack(msgspec.Struct, frozen=True, tag="dial_back"):
    """Connect to the dialling end, which listens there as an engine does."""

    host: ShortText
    port: Annotated[int, Meta(gt=0, lt=65536)]
    engine: ShortText


class DialedBack(msgspec.Struct, frozen=True, tag="dialed_back"):
    """How that went; ``failure`` is empty if it succeeded."""

    failure: LongText


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Measure an operation on the dialling end's memory. The answer comes within ``timeout``."""

    operation: Operation
    block_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    seconds: Annotated[float, Meta(gt=0, le=LONGEST_MEASUREMENT)]  # that the throughput is measured
    timeout: Annotated[float, Meta(gt=0, le=LONGEST_MEASUREMENT)]


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """The result, and what UCX has used there so far."""

    measurement: Measurement
    transports: ShortTexts


Content: TypeAlias = (
    Introduction | ClockProbe | ClockReply | DialBack | DialedBack | Measure | Measured
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Content] = msgspec.msgpack.Decoder(Content)


def wrap(content: Content) -> messages.Examination:
    """Return the message that carries it."""
    return messages.Examination(_encoder.encode(content))


def unwrap(message: messages.Examination) -> Content:
    """Parse what a message carries, or raise :exc:`~pdrelay_connector.errors.ProtocolViolation`."""
    try:
        return _decoder.decode(message.content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ProtocolViolation(f"not a message of this version's pdrelay doctor: {exc}") from exc


def shortened(text: str, most: int = 1024) -> str:
    """Return text of another end as one printable line of at most ``most`` characters."""
    return messages.printable(text)[:most]


def printable(facts: EndFacts) -> EndFacts:
    """Return facts of another end without what could steer a terminal."""
    cleaned = {
        name: shortened(value)
        for name in EndFacts.__struct_fields__
        if isinstance(value := getattr(facts, name), str)
    }
    return msgspec.structs.replace(
        facts,
        **cleaned,
        rdma=tuple(map(shortened, facts.rdma)),
        environment=tuple(map(shortened, facts.environment)),
    )
