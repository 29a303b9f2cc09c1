"""The ``kv_transfer_params`` that travel through the router: written by P, carried unread, read by D.

They are a superset of what vLLM 0.32's NixlConnector emits
(``vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py``), so that stock routers carry them.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from xpyd_connector.core.ids import Address, BlockId, EngineId
from xpyd_connector.core.messages import MAX_BLOCKS, RequestName
from xpyd_connector.errors import BadOffer


class Offer(msgspec.Struct, frozen=True):
    """Where a prefill engine keeps the KV blocks of a request it finished."""

    remote_engine_id: EngineId
    remote_request_id: RequestName
    remote_host: Annotated[str, Meta(min_length=1, max_length=255)]
    remote_port: int
    remote_block_ids: tuple[
        tuple[Annotated[BlockId, Meta(ge=0, lt=MAX_BLOCKS)], ...], ...
    ]  # one tuple per KV cache group, in token order
    remote_num_tokens: int
    tp_size: int = 1
    dcp_size: int = 1
    pp_size: int = 1
    transfer_mode: str = "pull"
    remote_blocks_expiry_time: float | None = None
    xpyd_prompt: str | None = None  # digest of the prompt; None when the prompt has no token ids

    @property
    def address(self) -> Address:
        """The side channel of the engine that lends the blocks."""
        return Address(self.remote_host, self.remote_port)

    def to_params(self) -> dict[str, Any]:
        """Return the JSON object the router hands to the decode engine."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {"do_remote_prefill": True, "do_remote_decode": False, **fields}


def read_offer(params: Mapping[str, Any]) -> Offer:
    """Read what the router carried here, or raise :exc:`~xpyd_connector.errors.BadOffer` saying what is wrong."""
    try:
        offer = msgspec.convert(params, Offer)
        f"{offer.remote_engine_id}{offer.remote_request_id}{offer.remote_host}".encode()
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
