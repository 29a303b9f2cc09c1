"""Every message on a control connection, parsed once at the border and typed from there on.

A connection is TLS 1.3. The decode engine (D) opens it, the prefill engine (P) accepts it::

    P: Challenge
    D: Hello
    P: ServerProof and Welcome, or Refusal

Both modes then use::

    D: RenewLeases         P: LeasesLost, for those not held; also when P revokes one
    D: DropLeases
    D: Objection           once, if P's fingerprint or shapes differ

Pull::

    D: ReadsStarted
    D: ReadDone            P: FenceResult

Push::

    D: RenewLeases         P: HeartbeatReply
    D: RankMemory          once for each rank
    D: RegisterPush        P: PushDone, or PushStopped; PushStalled may come first
    D: CancelPushes        P: PushStopped

A request is named by P's id of it in pull. In push D speaks first, so there the name is the
transfer id that both engines have from the router. P's workers write, and open a connection to
their own scheduler for that::

    worker: WorkerHello    scheduler: PeerMemory, StartPush, StopPush, PeerGone
    worker: PushWritten, PushAborted, WriteStalled

A decode engine whose prefix cache P may read (``return_kv``) says where it listens. P then is the
client, and reads the blocks as D does in pull, whatever the mode. An engine that has not said so is
not asked::

    D: Reachable           over the connection that D opened
    P: FindPrefix          D: PrefixFound
    P: RenewLeases, ReadsStarted, ReadDone, DropLeases
                           D: LeasesLost, FenceResult; in push HeartbeatReply

Where KV goes through host memory (staging), D reads in parts, and workers connect to their own
scheduler in pull, too::

    D: StagePart           from every rank
                           P: PartStaged, or PartRefused
    scheduler: CopyOut, CopyIn
                           worker: CopyEnded

The two ends of ``pdrelay doctor``, which are no engines, use RankMemory, Refusal and::

    either: Examination
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pdrelay_connector.core.ids import BlockId, ConnId, EngineId, PartId, RequestId
from pdrelay_connector.errors import ProtocolViolation

PROTOCOL = 11  # raised with every change that an older engine would misunderstand
MAX_FRAME = 1 << 20  # bytes of one message between engines that have proven themselves
# bytes of a Welcome: NIXL metadata of every rank, some KiB to some MiB each
MAX_GREETING = 64 << 20
# bytes of one message before the proof: a Hello that names MAX_RANKS workers fits
MAX_UNAUTHENTICATED_FRAME = 32768
MAX_IDS = 1024  # requests that one message names
HASH_BYTES = 16  # of a worker's badge, as its scheduler names it
# characters of a request id: MAX_IDS of the longest fit into MAX_FRAME, whatever the script
MAX_ID = 255
MAX_BLOCKS = 1 << 22  # blocks of one cache or of one request: 4 M blocks of 16 tokens
MAX_RANKS = 1024  # workers of one engine: tensor-parallel ranks of all pipeline stages
MAX_LAYER = 255  # characters of a layer's name
MAX_GROUPS = 64  # KV cache groups of one engine
# blocks of each KV cache group in one staged part: the largest CopyOut fits into MAX_FRAME
MAX_PART = 1024
MAX_HEADS = 1 << 16  # KV heads of one layer
MAX_PARTS = 1 << 16  # pieces of one entry
MAX_TOKENS = 1 << 20  # tokens of one block
MAX_PROMPT = 1 << 28  # tokens of one prompt
MAX_FIND = 200_000  # tokens of one FindPrefix, 4 bytes each: it fits into MAX_FRAME
MAX_FOUND = 1 << 17  # blocks of one PrefixFound, at most 5 bytes each
MAX_SALT = 1024  # characters of a cache salt
MAX_DIGEST = 64  # characters of a prompt's digest
MAX_REASON = 2048  # characters that say why a push stopped
MAX_SUMS = 256  # sampled blocks of one request
MAX_SUMMED = 64  # workers whose sums one PushDone carries: it fits into MAX_FRAME
SHORTEST_LEASE = 0.5  # s
LONGEST_LEASE = 1e9  # s
MAX_SHAPE = 64  # characters of a digest
MAX_EXAMINATION = 1 << 17  # bytes that one message of pdrelay doctor carries

RequestName: TypeAlias = Annotated[RequestId, Meta(max_length=MAX_ID)]
RequestNames: TypeAlias = Annotated[tuple[RequestName, ...], Meta(max_length=MAX_IDS)]
Reason: TypeAlias = Annotated[str, Meta(max_length=MAX_REASON)]
MemoryKind: TypeAlias = Literal["DRAM", "VRAM"]  # NIXL's names


class Fingerprint(msgspec.Struct, frozen=True):
    """What must be equal on both engines for their KV to mean the same.

    What may differ (tensor and pipeline parallelism, block sizes, layouts) stands in each rank's
    :class:`RankInfo`. Nothing here depends on where a model lies.
    """

    vllm: str
    dtype: str
    cache_dtype: str
    layers: int
    kv_heads: int
    head_size: int
    groups: str  # what kinds of KV cache groups there are, in order
    attention: str
    mode: str = "pull"
    code_revision: str = "none"  # of the model's code, where that comes with the weights
    quantization: str = "none"
    # What the model is: digests; of a draft model, whose layers' KV travels, too, in words. A
    # worker leaves them empty, and compares the rest: schedulers meet first.
    draft_model: str = ""
    config: str = ""
    tokenizer: str = ""
    weights: str = ""


class Region(msgspec.Struct, frozen=True):
    """One layer's cache on one rank, or the K or the V of it.

    It is ``count`` rows of ``heads`` x ``tokens`` entries of ``parts`` x ``width`` bytes. An entry
    is what is kept of one token, or of ``covers`` tokens, and one head: K and V side by side, or
    one of them, as a kernel likes it. A row is what the kernel calls a block: vLLM's block ``b`` is
    the rows from ``b * rows`` on. Layouts differ in the strides, which are bytes. Of a row that is
    ``opaque``, the kernel alone knows which byte belongs to whom. A ``state`` is one entry
    of a block, however many tokens it covers; its strides say how it is ordered. Where ``shards``
    ranks divide a context among them, each keeps ``interleave`` tokens in turn
    (``layout/shards.py``).
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
    # KV cache group: each has block tables of its own
    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)] = 0
    # of the layer; ranks share one if they are more
    all_heads: Annotated[int, Meta(ge=1, le=MAX_HEADS)] = 1
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)] = 1
    part_stride: Annotated[int, Meta(ge=0)] = 0
    opaque: bool = False
    state: bool = False
    # vLLM's name; K and V may be two regions of one layer
    layer: Annotated[str, Meta(max_length=MAX_LAYER)] = ""
    # tokens of an entry: a compressed cache has one for several
    covers: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 1
    # decode context parallel size: consecutive ranks keep other tokens of one context
    shards: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    interleave: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 1  # tokens

    @property
    def block_size(self) -> int:
        """Tokens of one of vLLM's blocks, on all ranks that divide a context among them."""
        return self.kept_tokens * self.shards

    @property
    def kept_tokens(self) -> int:
        """Tokens that this rank keeps in one of vLLM's blocks."""
        return self.rows * self.tokens * self.covers

    @property
    def blocks(self) -> int:
        """How many of vLLM's blocks there are."""
        return self.count // self.rows


class RankInfo(msgspec.Struct, frozen=True):
    """Describes one rank's memory to peers: its cache, or the host memory it is staged through."""

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]  # of its engine: tensor parallel size
    agent: bytes  # NIXL's own metadata, opaque
    memory: MemoryKind
    device: Annotated[int, Meta(ge=0, lt=1 << 16)]
    regions: Annotated[tuple[Region, ...], Meta(min_length=1)]
    staged: bool = False  # the regions are slots of a staging buffer, not the blocks of the cache
    # of the pipeline; the regions are those of its layers
    stage: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] = 0
    stages: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1  # pipeline parallel size

    @property
    def worker(self) -> int:
        """Number of the worker among those of its engine."""
        return self.stage * self.ranks + self.rank

    @property
    def workers(self) -> int:
        """How many workers the engine has."""
        return self.stages * self.ranks


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The server's first message: random bytes, so that a recorded Hello cannot be replayed."""

    protocol: int
    nonce: Annotated[bytes, Meta(max_length=64)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The client's identity, the engine it expects, and its proof that it knows the shared secret.

    The proof covers all other fields, and what only the two ends of this connection know
    (``session/handshake.py``).
    """

    protocol: int
    engine: Annotated[EngineId, Meta(max_length=MAX_ID)]
    role: Literal["scheduler", "worker"]
    expects: Annotated[EngineId, Meta(max_length=MAX_ID)]  # the server's engine
    host: Annotated[str, Meta(max_length=255)]  # as it was dialled
    port: Annotated[int, Meta(gt=0, lt=65536)]
    reached: Annotated[str, Meta(max_length=64)]  # IP address behind it
    nonce: Annotated[bytes, Meta(max_length=64)]
    # one for each secret
    proofs: Annotated[tuple[Annotated[bytes, Meta(max_length=64)], ...], Meta(max_length=2)]
    badge: Annotated[bytes, Meta(max_length=64)] = b""  # of a worker: known to its scheduler, too
    # hashes of the badges of a scheduler's workers
    workers: Annotated[
        tuple[Annotated[bytes, Meta(max_length=64)], ...], Meta(max_length=MAX_RANKS)
    ] = ()


class ServerProof(msgspec.Struct, frozen=True, tag="server_proof"):
    """The server's proof that it knows the shared secret; empty where none is set."""

    proof: Annotated[bytes, Meta(max_length=64)]


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """P's id, fingerprint and the memory of its ranks."""

    protocol: int
    engine: EngineId
    fingerprint: Fingerprint
    ranks: tuple[RankInfo, ...]
    lease: Annotated[float, Meta(ge=SHORTEST_LEASE)] = LONGEST_LEASE  # s: P's kv_lease_duration


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The server refuses the client and closes the connection."""

    reason: Reason
    is_another: bool = False  # the server is not the engine that the client expects
    cause: Literal["refused", "secret", "version"] = "refused"


class Objection(msgspec.Struct, frozen=True, tag="objection"):
    """D is connected to P, and will not load any KV of it while both run."""

    reason: Reason


class RenewLeases(msgspec.Struct, frozen=True, tag="renew_leases"):
    """D extends the leases of these requests (P's ids).

    A lease ends with the connection that renewed it.

    ``pulled``: in mode auto, they were offered to be read, so a prefill that has yet to end is none
    of them.
    """

    requests: RequestNames
    pulled: bool = False


class LeasesLost(msgspec.Struct, frozen=True, tag="leases_lost"):
    """P holds no lease of these requests for this D: reads that have not begun must not begin."""

    requests: RequestNames


class ReadsStarted(msgspec.Struct, frozen=True, tag="reads_started"):
    """D's workers read these requests' blocks now; for a while P revokes other leases first."""

    requests: RequestNames


class ReadDone(msgspec.Struct, frozen=True, tag="read_done"):
    """Worker ``rank`` of D's ``ranks`` has read its part; ``reader``: D's id of the request."""

    request: RequestName
    reader: RequestName
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]


class BlockSum(msgspec.Struct, frozen=True, array_like=True):
    """The CRC-32 of a block's bytes for the tokens from ``start`` to ``stop``, in one group."""

    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    start: Annotated[int, Meta(ge=0, le=MAX_PROMPT)]
    stop: Annotated[int, Meta(ge=0, le=MAX_PROMPT)]
    crc: Annotated[int, Meta(ge=0, lt=1 << 32)]


class RankSums(msgspec.Struct, frozen=True):
    """Checksums of sampled blocks as one worker of P has computed them.

    ``shape`` says of which bytes they are.
    """

    worker: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    shape: Annotated[str, Meta(max_length=MAX_SHAPE)]
    blocks: Annotated[tuple[BlockSum, ...], Meta(max_length=MAX_SUMS)]


class FenceResult(msgspec.Struct, frozen=True, tag="fence_result"):
    """Whether P still held the lease when ``reader``'s ReadDone came: only then the KV is valid.

    ``sums`` are those of the worker with the reader's number, if P has sampled the request.
    """

    reader: RequestName
    held: bool
    sums: RankSums | None = None


class DropLeases(msgspec.Struct, frozen=True, tag="drop_leases"):
    """D will not read the blocks of these requests. ``pulled``: as in :class:`RenewLeases`."""

    requests: RequestNames
    pulled: bool = False


class Reachable(msgspec.Struct, frozen=True, tag="reachable"):
    """The address of D's side channel, where P may ask for blocks of D's prefix cache."""

    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(gt=0, lt=65536)]


class FindPrefix(msgspec.Struct, frozen=True, tag="find_prefix"):
    """Lease the cached blocks that begin this prompt; ``request``: the sender's id of it.

    ``tokens`` are ids of 4 bytes each, little-endian. Only the tokens and the cache ``salt`` decide
    the KV of the prompt: it has no images and no adapter.
    """

    request: RequestName
    tokens: Annotated[bytes, Meta(max_length=4 * MAX_FIND)]
    salt: Annotated[str, Meta(max_length=MAX_SALT)] | None


class PrefixFound(msgspec.Struct, frozen=True, tag="prefix_found"):
    """The first ``blocks`` of the prompt are leased as ``lease``; without blocks nothing is."""

    request: RequestName
    lease: RequestName = RequestId("")
    block_size: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0  # tokens
    blocks: Annotated[
        tuple[Annotated[BlockId, Meta(ge=0, lt=MAX_BLOCKS)], ...], Meta(max_length=MAX_FOUND)
    ] = ()


class HeartbeatReply(msgspec.Struct, frozen=True, tag="heartbeat_reply"):
    """P has received a RenewLeases. Without it, a D that waits for a push knows that P hangs."""


class RankMemory(msgspec.Struct, frozen=True, tag="rank_memory"):
    """The memory of one of D's ranks, for P to write into."""

    rank: RankInfo


class LentBlocks(msgspec.Struct, frozen=True):
    """Blocks for the prompt's tokens from ``start``, which is in the first block, to ``stop``."""

    start: Annotated[int, Meta(ge=0, le=MAX_PROMPT)]
    stop: Annotated[int, Meta(ge=0, le=MAX_PROMPT)]
    blocks: tuple[Annotated[BlockId, Meta(ge=0, lt=MAX_BLOCKS)], ...]


class RegisterPush(msgspec.Struct, frozen=True, tag="register_push"):
    """D lends blocks of each group for a transfer, until P sends PushDone or PushStopped.

    ``reader`` is D's own id of the request. ``prompt`` is the prompt's digest and must equal P's;
    None only where the prompt has no token ids.
    """

    reader: RequestName
    request: RequestName
    prompt: Annotated[str, Meta(max_length=MAX_DIGEST)] | None
    groups: Annotated[tuple[LentBlocks, ...], Meta(min_length=1, max_length=MAX_GROUPS)]


class PushDone(msgspec.Struct, frozen=True, tag="push_done"):
    """Every rank of P has written all blocks of ``reader``.

    They are valid only if P ``held`` its lease until then.
    """

    reader: RequestName
    held: bool
    # of its workers, if P has sampled it
    sums: Annotated[tuple[RankSums, ...], Meta(max_length=MAX_SUMMED)] = ()


class CancelPushes(msgspec.Struct, frozen=True, tag="cancel_pushes"):
    """D aborts these pushes, or asks about those of an ended connection; each gets PushStopped."""

    readers: RequestNames


class PushStopped(msgspec.Struct, frozen=True, tag="push_stopped"):
    """P will not write into the blocks of ``reader`` again; ``lease_lost`` if that is why."""

    reader: RequestName
    reason: Reason
    lease_lost: bool = False


class PushStalled(msgspec.Struct, frozen=True, tag="push_stalled"):
    """A write does not end: the push has failed, but may still reach D's memory.

    PushStopped follows at its end.
    """

    reader: RequestName
    reason: Reason


class WorkerHello(msgspec.Struct, frozen=True, tag="worker_hello"):
    """A worker of this engine can write or stage (or, with ``receives_pushes``, copy pushed KV in).

    ``token`` proves that it is this engine's worker.
    """

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    token: Annotated[bytes, Meta(max_length=64)]
    receives_pushes: bool = False


class PeerMemory(msgspec.Struct, frozen=True, tag="peer_memory"):
    """The memory of one rank of ``peer``, a decode engine whose id is ``engine``."""

    peer: ConnId
    rank: RankInfo
    engine: Annotated[EngineId, Meta(max_length=MAX_ID)] = EngineId("")


class StartPush(msgspec.Struct, frozen=True, tag="start_push"):
    """Write what ``peer`` has registered, as it is computed."""

    peer: ConnId
    register: RegisterPush


class StopPush(msgspec.Struct, frozen=True, tag="stop_push"):
    """Write no more for this reader; the worker sends PushAborted when no write is in flight."""

    peer: ConnId
    reader: RequestName


class PeerGone(msgspec.Struct, frozen=True, tag="peer_gone"):
    """``peer`` has disconnected: stop all its pushes."""

    peer: ConnId


class PushWritten(msgspec.Struct, frozen=True, tag="push_written"):
    """This worker has written all registered blocks of the reader."""

    peer: ConnId
    reader: RequestName
    sums: RankSums | None = None


class PushAborted(msgspec.Struct, frozen=True, tag="push_aborted"):
    """This worker has stopped writing for the reader, on request or after a failure."""

    peer: ConnId
    reader: RequestName
    reason: Reason


class WriteStalled(msgspec.Struct, frozen=True, tag="write_stalled"):
    """A write of this worker for the reader does not end; PushAborted follows when it does."""

    peer: ConnId
    reader: RequestName
    reason: Reason


PartBlocks: TypeAlias = Annotated[
    tuple[
        Annotated[
            tuple[Annotated[BlockId, Meta(ge=0, lt=MAX_BLOCKS)], ...], Meta(max_length=MAX_PART)
        ],
        ...,
    ],
    Meta(min_length=1, max_length=MAX_GROUPS),
]  # of each KV cache group
PartNumber: TypeAlias = Annotated[PartId, Meta(ge=0, le=(1 << 63) - 1)]


class StagePart(msgspec.Struct, frozen=True, tag="stage_part"):
    """One of D's ``ranks`` is ready to read the next ``part``: ``groups`` are P's blocks of it.

    The rank has read all earlier parts. ``reader`` is D's own id; all ranks ask for the same blocks
    and read the same slots.
    """

    request: RequestName
    reader: RequestName
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    part: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
    groups: PartBlocks


class PartStaged(msgspec.Struct, frozen=True, tag="part_staged"):
    """The part is in these slots of every rank of P, until D's ranks go on or the lease ends."""

    reader: RequestName
    part: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
    groups: PartBlocks


class PartRefused(msgspec.Struct, frozen=True, tag="part_refused"):
    """P will not stage the part."""

    reader: RequestName
    part: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
    reason: Reason


class CopyOut(msgspec.Struct, frozen=True, tag="copy_out"):
    """Copy blocks of each group into slots of host memory; answered by CopyEnded."""

    number: PartNumber
    blocks: PartBlocks
    slots: PartBlocks


class CopyIn(msgspec.Struct, frozen=True, tag="copy_in"):
    """Copy slots of host memory into blocks of each group; answered by CopyEnded."""

    number: PartNumber
    slots: PartBlocks
    blocks: PartBlocks


class CopyEnded(msgspec.Struct, frozen=True, tag="copy_ended"):
    """A copy of this worker has ended; ``reason`` is empty if it succeeded."""

    number: PartNumber
    reason: Reason


class Examination(msgspec.Struct, frozen=True, tag="examination"):
    """A message of ``pdrelay doctor`` (``doctor/examination.py``); engines ignore it."""

    content: Annotated[bytes, Meta(max_length=MAX_EXAMINATION)]


Message: TypeAlias = (
    Challenge | Hello | ServerProof | Welcome | Refusal
    | Objection | RenewLeases | LeasesLost | ReadsStarted | ReadDone | FenceResult | DropLeases
    | HeartbeatReply | RankMemory | RegisterPush | PushDone | CancelPushes | PushStopped | PushStalled
    | WorkerHello | PeerMemory | StartPush | StopPush | PeerGone | PushWritten | PushAborted | WriteStalled
    | Reachable | FindPrefix | PrefixFound
    | StagePart | PartStaged | PartRefused | CopyOut | CopyIn | CopyEnded | Examination
)  # fmt: skip


def printable(text: str) -> str:
    """Return a peer's words for our log, into which it must not inject control characters."""
    return "".join(char if char.isprintable() else "?" for char in text)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def by_message(requests: Iterable[RequestId]) -> Iterator[tuple[RequestId, ...]]:
    """Divide names into as many as one message may have."""
    names = tuple(requests)
    for start in range(0, len(names), MAX_IDS):
        yield names[start : start + MAX_IDS]


def fits(message: Message) -> bool:
    """Whether a message is short enough to be sent: a longer one ends its connection.

    Ask before a peer's words are passed on: what wraps them is longer, and so is what they left out
    because it is the default.
    """
    return len(encode(message)) <= MAX_FRAME


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Parse a message, or raise :exc:`~pdrelay_connector.errors.ProtocolViolation`."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        # ValueError: text that is not UTF-8; msgspec's errors are such ones, too, but since 0.21
        raise ProtocolViolation(f"not a message of protocol {PROTOCOL}: {exc}") from exc
