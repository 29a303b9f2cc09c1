"""The ``kv_transfer_params`` that travel through the router.

In pull they are written by P, carried unread and read by D. They are a superset of what vLLM 0.32's NixlConnector emits
(``vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py``), so that stock routers carry them.

In push both legs leave at once. The router has P's coordinates from an earlier reply, and names the transfer; where it
does not, the request's id does, without the part that vLLM adds on each engine (as NixlPushConnector matches them).
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from xpyd_connector.core.ids import Address, BlockId, EngineId, RequestId
from xpyd_connector.core.messages import MAX_BLOCKS, MAX_ID, MAX_PROMPT, MAX_RANKS, MAX_TOKENS, RequestName
from xpyd_connector.errors import BadOffer, ExpiredOffer, ForgedOffer, OtherPrompt, UnsignedOffer

Size: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
MAX_TIME = 1 << 40  # s since the epoch
MAX_SIGNATURE = 128  # characters
REFUSALS: Final[Mapping[type[BadOffer], str]] = {
    BadOffer: "offers_bad",
    OtherPrompt: "offers_other_prompt",
    UnsignedOffer: "offers_unsigned",
    ForgedOffer: "offers_forged",
    ExpiredOffer: "offers_expired",
}  # what is counted when an offer is not used


class Offer(msgspec.Struct, frozen=True):
    """Where a prefill engine keeps the KV blocks of a request it finished."""

    remote_engine_id: EngineId
    remote_request_id: RequestName
    remote_host: Annotated[str, Meta(min_length=1, max_length=255)]
    remote_port: int
    remote_block_ids: tuple[
        tuple[Annotated[BlockId, Meta(ge=0, lt=MAX_BLOCKS)], ...], ...
    ]  # one tuple per KV cache group, from the prompt's first token on; 0: not held (out of a sliding window)
    remote_num_tokens: Annotated[int, Meta(ge=0, le=MAX_PROMPT)]
    tp_size: Size = 1
    dcp_size: Size = 1
    pp_size: Size = 1
    transfer_mode: str = "pull"
    remote_blocks_expiry_time: float | None = None  # vLLM 0.32: of blocks that D lends, on its own monotonic clock
    xpyd_prompt: str | None = None  # digest of the prompt; None when the prompt has no token ids
    transfer_id: str | None = None  # the transfer's name in push: a router that waits for P hands it to D, too
    xpyd_block_sizes: tuple[Annotated[int, Meta(ge=1, le=MAX_TOKENS)], ...] = ()  # tokens, one per KV cache group
    xpyd_expires_at: Annotated[int, Meta(ge=0, le=MAX_TIME)] | None = None  # s since the epoch, on P's clock
    xpyd_signature: Annotated[str, Meta(max_length=MAX_SIGNATURE)] | None = None  # core/lease/signatures.py

    @property
    def address(self) -> Address:
        """The side channel of the engine that lends the blocks."""
        return Address(self.remote_host, self.remote_port)

    def to_params(self) -> dict[str, Any]:
        """Return the JSON object the router hands to the decode engine."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {"do_remote_prefill": True, "do_remote_decode": False, **fields}


class Booking(msgspec.Struct, frozen=True):
    """From which prefill engine a decode request will get its KV, and by which name."""

    remote_engine_id: EngineId
    remote_host: Annotated[str, Meta(min_length=1, max_length=255)]
    remote_port: Annotated[int, Meta(gt=0, lt=65536)]
    transfer_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID)] | None = None
    remote_request_id: RequestName = RequestId("")  # the transfer's name, once read_booking has settled it

    @property
    def address(self) -> Address:
        """The side channel of the engine that will write."""
        return Address(self.remote_host, self.remote_port)


def read_booking(params: Mapping[str, Any], own: str) -> Booking:
    """Read what the router tells a decode engine about a push, or raise :exc:`~xpyd_connector.errors.BadOffer`.

    ``own`` is vLLM's id of the request here.
    """
    try:
        booking = msgspec.convert({k: v for k, v in params.items() if k != "remote_request_id"}, Booking)
        f"{booking.remote_engine_id}{booking.transfer_id}{booking.remote_host}".encode()
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:  # half a surrogate pair is JSON, but no text
        raise BadOffer(f"kv_transfer_params: {exc}") from exc
    if params.get("transfer_mode", "push") != "push":
        raise BadOffer(
            f"kv_transfer_params: transfer_mode is {params['transfer_mode']!r}, this engine takes 'push' only"
        )
    name = booking.transfer_id or common_id(own)
    if len(name) > MAX_ID:
        raise BadOffer(f"the request's id has {len(name)} characters, {MAX_ID} are allowed")
    return msgspec.structs.replace(booking, remote_request_id=RequestId(name))


def read_transfer(params: Mapping[str, Any], own: str) -> RequestId:
    """Return the name of the transfer for which a prefill engine computes a prompt; raises ``BadOffer``."""
    name = params.get("transfer_id") or common_id(own)
    if not isinstance(name, str) or len(name) > MAX_ID or not name.isprintable():
        raise BadOffer(f"kv_transfer_params: transfer_id must be printable text of at most {MAX_ID} characters")
    return RequestId(name)


def common_id(own: str) -> str:
    """Return the part of a request's id that is the same on P and D: without the suffix vLLM adds to it."""
    return re.sub(r"-[0-9a-f]{8}$", "", own)


def read_offer(params: Mapping[str, Any]) -> Offer:
    """Read what the router carried here, or raise :exc:`~xpyd_connector.errors.BadOffer` saying what is wrong."""
    try:
        offer = msgspec.convert(params, Offer)
        texts = (
            offer.remote_engine_id,
            offer.remote_request_id,
            offer.remote_host,
            offer.xpyd_prompt,
            offer.transfer_id,
        )
        "".join(text for text in texts if text is not None).encode()
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:  # half a surrogate pair is JSON, but no text
        raise BadOffer(f"kv_transfer_params: {exc}") from exc
    if offer.transfer_mode != "pull":
        raise BadOffer(f"kv_transfer_params: transfer_mode is {offer.transfer_mode!r}, this engine reads 'pull' only")
    if not 0 < offer.remote_port < 65536:
        raise BadOffer(f"kv_transfer_params: remote_port is {offer.remote_port}, not a TCP port")
    if not 0 < sum(map(len, offer.remote_block_ids)) <= MAX_BLOCKS:
        raise BadOffer(f"kv_transfer_params: remote_block_ids names no block, or more than {MAX_BLOCKS}")
    return offer


def digest_prompt(token_ids: Sequence[int] | None, features: Iterable[str], salt: str | None) -> str | None:
    """Return a digest of everything that decides the prompt's KV, or None when there are no token ids.

    P sends it and D compares: whatever a router mixes up (prompt arrays, retries, reused ids), D then computes
    the prompt itself instead of answering from another prompt's KV. ``features`` are vLLM's multimodal hashes.
    """
    if token_ids is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.msgpack.encode((token_ids, list(features), salt)))
    return digest.hexdigest()
