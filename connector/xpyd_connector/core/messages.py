"""Every byte two engines exchange on their control connection, parsed once and typed ever after.

A connection is TLS 1.3, opened by the decode engine (D) and answered by the prefill engine (P)::

    P: Challenge            D: Hello               P: Proven and Welcome, or Refusal, then
    D: Drop

    pull                                           push
    D: Renew                P: Lapsed, if any are  D: Renew       P: Alive, and Lapsed, if any are
    D: Reads                                       D: Memory, once for each rank
    D: Done                 P: Fenced
                                                   D: Register    P: Landed, or Stopped; Stuck before it
                                                   D: Stop        P: Stopped

P says Lapsed unasked, too, when it revokes a lease. A request's name is P's id for it in pull; in push, where D speaks
first, it is the name of the transfer that both engines have from the router. In push, P's workers, who write, open a
connection to their own scheduler, too::

    worker: Attend          scheduler: Arrived, Assign, Cease, Departed
    worker: Written, Ceased, Stalled

Where KV goes through host memory (staging), D reads in parts, and workers attend their own scheduler in pull, too::

    D: Stage, from every rank                      P: Staged, or Unstaged
    scheduler: CopyOut, CopyIn                     worker: CopyEnded
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from xpyd_connector.core.ids import BlockId, ConnId, EngineId, PartId, RequestId
from xpyd_connector.errors import ProtocolViolation

PROTOCOL = 4  # raised with every change that an older engine would misunderstand
MAX_FRAME = 1 << 20  # bytes of one message between engines that have met
MAX_GREETING = 64 << 20  # bytes of a Welcome: NIXL metadata of every rank, some KiB to some MiB each
MAX_STRANGER = 32768  # bytes of a message of somebody who has not proven anything: a Hello of MAX_RANKS workers fits
MAX_IDS = 1024  # requests one Renew, Lapsed or Drop names
HASH_BYTES = 16  # of a worker's badge, as its scheduler names it
MAX_ID = 255  # characters of a request id: MAX_IDS of the longest fit into MAX_FRAME, whatever the script
MAX_BLOCKS = 1 << 22  # blocks of one cache or of one request: 4 M blocks of 16 tokens
MAX_RANKS = 1024  # tensor-parallel ranks of one engine
MAX_GROUPS = 64  # KV cache groups of one engine
MAX_PART = 1024  # blocks of each KV cache group in one staged part: the largest CopyOut fits into MAX_FRAME
MAX_HEADS = 1 << 16  # KV heads of one layer
MAX_PARTS = 1 << 16  # pieces of one entry
MAX_TOKENS = 1 << 20  # tokens of one block
MAX_PROMPT = 1 << 28  # tokens of one prompt
MAX_DIGEST = 64  # characters of a prompt's digest
MAX_REASON = 2048  # characters that say why a push stopped

RequestName: TypeAlias = Annotated[RequestId, Meta(max_length=MAX_ID)]
RequestNames: TypeAlias = Annotated[tuple[RequestName, ...], Meta(max_length=MAX_IDS)]
Reason: TypeAlias = Annotated[str, Meta(max_length=MAX_REASON)]
MemoryKind: TypeAlias = Literal["DRAM", "VRAM"]  # NIXL's names


class Fingerprint(msgspec.Struct, frozen=True):
    """What must be equal on both engines for their KV to mean the same.

    What may differ (tensor parallelism, block sizes, layouts) stands in each rank's :class:`RankInfo`.
    """

    vllm: str
    model: str
    dtype: str
    cache_dtype: str
    layers: int
    kv_heads: int
    head_size: int
    groups: str  # what kinds of KV cache groups there are, in order
    pipeline_parallel: int
    attention: str
    mode: str = "pull"
    revision: str = "none"  # commit of the model's weights; two with equal shapes have other KV
    code_revision: str = "none"  # of the model's code, where that comes with the weights
    quantization: str = "none"
    draft_model: str = "none"  # whose layers' KV travels, too


class Region(msgspec.Struct, frozen=True):
    """One layer's cache on one rank: ``count`` rows of ``heads`` x ``tokens`` entries of ``parts`` x ``width`` bytes.

    An entry is what is kept of one token and one head: K and V side by side, or one of them, as a kernel likes it. A
    row is what the kernel calls a block: vLLM's block ``b`` is the rows from ``b * rows`` on. Layouts differ in the
    strides, which are bytes. Of a row that is ``opaque``, the kernel alone knows which byte belongs to whom.
    """

    base: Annotated[int, Meta(ge=0)]  # address of row 0, head 0, token 0
    count: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    heads: Annotated[int, Meta(ge=1, le=MAX_HEADS)]
    tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    width: Annotated[int, Meta(ge=1)]
    row_stride: Annotated[int, Meta(ge=0)]
    head_stride: Annotated[int, Meta(ge=0)]
    token_stride: Annotated[int, Meta(ge=0)]
    rows: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 1  # of one of vLLM's blocks
    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)] = 0  # KV cache group: each has block tables of its own
    all_heads: Annotated[int, Meta(ge=1, le=MAX_HEADS)] = 1  # of the layer; ranks share one if they are more
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)] = 1
    part_stride: Annotated[int, Meta(ge=0)] = 0
    opaque: bool = False

    @property
    def block_size(self) -> int:
        """Tokens of one of vLLM's blocks."""
        return self.rows * self.tokens

    @property
    def blocks(self) -> int:
        """How many of vLLM's blocks there are."""
        return self.count // self.rows


class RankInfo(msgspec.Struct, frozen=True):
    """What a peer must know to reach one rank's memory: its cache, or the host memory it is staged through."""

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]  # of its engine: tensor parallel size
    agent: bytes  # NIXL's own metadata, opaque
    memory: MemoryKind
    device: Annotated[int, Meta(ge=0, lt=1 << 16)]
    regions: Annotated[tuple[Region, ...], Meta(min_length=1)]
    staged: bool = False  # the regions are slots of a staging buffer, not the blocks of the cache


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The host opens with random bytes, so that a recorded Hello is worth nothing."""

    protocol: int
    nonce: Annotated[bytes, Meta(max_length=64)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The guest says who it is and whom it wants to meet, and proves that it knows the shared secret.

    A proof covers all other fields, and what only the two ends of this connection know (``core/session/handshake.py``).
    """

    protocol: int
    engine: Annotated[EngineId, Meta(max_length=MAX_ID)]
    role: Literal["scheduler", "worker"]
    expects: Annotated[EngineId, Meta(max_length=MAX_ID)]  # the host's engine
    host: Annotated[str, Meta(max_length=255)]  # as it was dialled
    port: Annotated[int, Meta(gt=0, lt=65536)]
    reached: Annotated[str, Meta(max_length=64)]  # IP address behind it
    nonce: Annotated[bytes, Meta(max_length=64)]
    proofs: Annotated[tuple[Annotated[bytes, Meta(max_length=64)], ...], Meta(max_length=2)]  # one for each secret
    badge: Annotated[bytes, Meta(max_length=64)] = b""  # of a worker: known to its scheduler, too
    workers: Annotated[tuple[Annotated[bytes, Meta(max_length=64)], ...], Meta(max_length=MAX_RANKS)] = ()  # hashes of
    # the badges of a scheduler's workers


class Proven(msgspec.Struct, frozen=True, tag="proven"):
    """The host proves that it knows the shared secret, too; empty if there is none."""

    proof: Annotated[bytes, Meta(max_length=64)]


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """P says who it is and where its blocks lie."""

    protocol: int
    engine: EngineId
    fingerprint: Fingerprint
    ranks: tuple[RankInfo, ...]


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The host will not talk to this guest."""

    reason: Reason


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """D still wants these requests' blocks (P's ids). They live as long as this connection, if renewed."""

    requests: RequestNames


class Lapsed(msgspec.Struct, frozen=True, tag="lapsed"):
    """P does not hold the blocks of these requests, or not for this D: what has not begun to read them must not."""

    requests: RequestNames


class Reads(msgspec.Struct, frozen=True, tag="reads"):
    """D's workers read these requests' blocks from now on: for a while, P revokes others first."""

    requests: RequestNames


class Done(msgspec.Struct, frozen=True, tag="done"):
    """One of D's ``ranks`` ranks has read everything it wanted of this request; ``reader`` is D's own id for it."""

    request: RequestName
    reader: RequestName
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """Whether P still held the blocks when it received the Done of ``reader``: only then the bytes are right."""

    reader: RequestName
    held: bool


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """D will not read these requests' blocks."""

    requests: RequestNames


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """P has read a Renew. A D that waits for a push learns from the silence that P hangs."""


class Memory(msgspec.Struct, frozen=True, tag="memory"):
    """Where one of D's ranks keeps its blocks, for P to write into."""

    rank: RankInfo


class Lent(msgspec.Struct, frozen=True):
    """Blocks for the prompt's tokens from ``start`` to ``stop``; the first is the block that ``start`` is in."""

    start: Annotated[int, Meta(ge=0, le=MAX_PROMPT)]
    stop: Annotated[int, Meta(ge=0, le=MAX_PROMPT)]
    blocks: tuple[Annotated[BlockId, Meta(ge=0, lt=MAX_BLOCKS)], ...]


class Register(msgspec.Struct, frozen=True, tag="register"):
    """D lends blocks of each KV cache group for the KV of a transfer, which it lacks.

    They are D's again when P has said Landed or Stopped. ``reader`` is D's own id of the request. The ``prompt`` is its
    digest, and must be P's own: None only where the prompt has no token ids.
    """

    reader: RequestName
    request: RequestName
    prompt: Annotated[str, Meta(max_length=MAX_DIGEST)] | None
    groups: Annotated[tuple[Lent, ...], Meta(min_length=1, max_length=MAX_GROUPS)]


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """Every rank of P has written all blocks of ``reader``; only if P ``held`` its own until then, they are right."""

    reader: RequestName
    held: bool


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """D does not want these pushes any more."""

    readers: RequestNames


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """P does not write into the blocks of ``reader`` and never will again; whether because its lease ``lapsed``."""

    reader: RequestName
    reason: Reason
    lapsed: bool = False


class Stuck(msgspec.Struct, frozen=True, tag="stuck"):
    """A write does not end: the push has failed, but may yet reach D's memory. Stopped follows when it is over."""

    reader: RequestName
    reason: Reason


class Attend(msgspec.Struct, frozen=True, tag="attend"):
    """A worker of this very engine is ready: to write or to stage, or if it ``unpacks``, to copy in what landed here.

    ``token`` proves that it is one.
    """

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    token: Annotated[bytes, Meta(max_length=64)]
    unpacks: bool = False


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """Guest number ``guest``, a decode engine, keeps its blocks here."""

    guest: ConnId
    rank: RankInfo


class Assign(msgspec.Struct, frozen=True, tag="assign"):
    """Write what the guest registered, as soon and as far as it is computed."""

    guest: ConnId
    register: Register


class Cease(msgspec.Struct, frozen=True, tag="cease"):
    """Write no more for this reader; answered by Ceased when nothing is in flight."""

    guest: ConnId
    reader: RequestName


class Departed(msgspec.Struct, frozen=True, tag="departed"):
    """The guest is gone: cease everything of it, and tell nobody."""

    guest: ConnId


class Written(msgspec.Struct, frozen=True, tag="written"):
    """This worker has written everything the reader registered."""

    guest: ConnId
    reader: RequestName


class Ceased(msgspec.Struct, frozen=True, tag="ceased"):
    """This worker does not write for the reader any more, because it was told so or could not."""

    guest: ConnId
    reader: RequestName
    reason: Reason


class Stalled(msgspec.Struct, frozen=True, tag="stalled"):
    """A write of this worker for the reader does not end; Ceased follows when it does."""

    guest: ConnId
    reader: RequestName
    reason: Reason


PartBlocks: TypeAlias = Annotated[
    tuple[Annotated[tuple[Annotated[BlockId, Meta(ge=0, lt=MAX_BLOCKS)], ...], Meta(max_length=MAX_PART)], ...],
    Meta(min_length=1, max_length=MAX_GROUPS),
]  # of each KV cache group
PartNumber: TypeAlias = Annotated[PartId, Meta(ge=0, le=(1 << 63) - 1)]


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """One of D's ``ranks`` ranks is ready to read the next ``part`` of a request: ``groups`` are P's blocks of it.

    It has read the parts before. ``reader`` is D's own id; all of its ranks ask for the same, and get the same slots.
    """

    request: RequestName
    reader: RequestName
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    part: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
    groups: PartBlocks


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """The part is in these slots of every rank of P, until every rank of the reader has gone on, or the lease ends."""

    reader: RequestName
    part: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
    groups: PartBlocks


class Unstaged(msgspec.Struct, frozen=True, tag="unstaged"):
    """The part will not be staged."""

    reader: RequestName
    part: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
    reason: Reason


class CopyOut(msgspec.Struct, frozen=True, tag="copy_out"):
    """Copy these blocks into these slots of host memory, both of each KV cache group; answered by CopyEnded."""

    number: PartNumber
    blocks: PartBlocks
    slots: PartBlocks


class CopyIn(msgspec.Struct, frozen=True, tag="copy_in"):
    """Copy these slots of host memory into these blocks, both of each KV cache group; answered by CopyEnded."""

    number: PartNumber
    slots: PartBlocks
    blocks: PartBlocks


class CopyEnded(msgspec.Struct, frozen=True, tag="copy_ended"):
    """This worker's copy is over; ``reason`` is empty when all of it is where it belongs."""

    number: PartNumber
    reason: Reason


Message: TypeAlias = (
    Challenge | Hello | Proven | Welcome | Refusal
    | Renew | Lapsed | Reads | Done | Fenced | Drop
    | Alive | Memory | Register | Landed | Stop | Stopped | Stuck
    | Attend | Arrived | Assign | Cease | Departed | Written | Ceased | Stalled
    | Stage | Staged | Unstaged | CopyOut | CopyIn | CopyEnded
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Parse a message, or raise :exc:`~xpyd_connector.errors.ProtocolViolation`."""
    try:
        return _decoder.decode(data)
    except (ValueError, RecursionError) as exc:  # of which msgspec's own errors, and text that is not UTF-8
        raise ProtocolViolation(f"not a message of protocol {PROTOCOL}: {exc}") from exc
