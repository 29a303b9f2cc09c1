"""The ``kv_transfer_params`` that routers carry between prefill (P) and decode (D) engines.

Pull: P writes them, the router passes them on, D reads them. They are a superset of those of vLLM
0.32's NixlConnector (``vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py``), so
stock routers work.

Push: the router sends both legs at once. It knows P's coordinates from an earlier response, and
sets the transfer id. Without one, the transfer is named by the request id less the suffix that vLLM
adds on each engine, as in vLLM's NixlPushConnector.

Auto: engines take both. The router says ``"transfer_mode": "push"`` to P and D of a request that it
wants pushed.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta

from pdrelay_connector.core.ids import Address, BlockId, EngineId, RequestId
from pdrelay_connector.core.messages import (
    MAX_BLOCKS,
    MAX_ID,
    MAX_PROMPT,
    MAX_RANKS,
    MAX_TOKENS,
    RequestName,
)
from pdrelay_connector.errors import (
    AdapterMismatch,
    ExpiredKvParams,
    ForgedKvParams,
    InvalidKvParams,
    PromptMismatch,
    ReplacedHost,
    UnsignedKvParams,
)

Size: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
MAX_TIME = 1 << 40  # s since the epoch
MAX_ADAPTER = 2048  # characters
MAX_SIGNATURE = 128  # characters
EXACT: Final = 2.0**53  # below it each whole number is one float (IEEE 754, binary64)
_Params = TypeVar("_Params", bound=msgspec.Struct)
REFUSALS: Final[Mapping[type[InvalidKvParams], str]] = {
    InvalidKvParams: "kv_params_invalid",
    PromptMismatch: "kv_params_other_prompt",
    AdapterMismatch: "kv_params_other_adapter",
    UnsignedKvParams: "kv_params_unsigned",
    ForgedKvParams: "kv_params_forged",
    ReplacedHost: "kv_params_host_replaced",
    ExpiredKvParams: "kv_params_expired",
}  # the counter of each reason not to use the params


class PullParams(msgspec.Struct, frozen=True):
    """Where P keeps the KV blocks of a finished prompt."""

    remote_engine_id: EngineId
    remote_request_id: RequestName
    remote_host: Annotated[str, Meta(min_length=1, max_length=255)]
    remote_port: int
    # One tuple per KV cache group, from the prompt's first token on; 0: not held (out of a sliding
    # window).
    remote_block_ids: tuple[tuple[Annotated[BlockId, Meta(ge=0, lt=MAX_BLOCKS)], ...], ...]
    remote_num_tokens: Annotated[int, Meta(ge=0, le=MAX_PROMPT)]
    tp_size: Size = 1
    dcp_size: Size = 1
    pp_size: Size = 1
    transfer_mode: str = "pull"
    # vLLM 0.32: of blocks that D lends, on its own monotonic clock
    remote_blocks_expiry_time: float | None = None
    pdrelay_prompt: str | None = None  # digest of the prompt; None when the prompt has no token ids
    # LoRA: its name and what it is
    pdrelay_adapter: Annotated[str, Meta(max_length=MAX_ADAPTER)] | None = None
    # push: the transfer id, for routers that wait for P before they call D
    transfer_id: str | None = None
    # tokens, one per KV cache group
    pdrelay_block_sizes: tuple[Annotated[int, Meta(ge=1, le=MAX_TOKENS)], ...] = ()
    # s since the epoch, on P's clock
    pdrelay_expires_at: Annotated[int, Meta(ge=0, le=MAX_TIME)] | None = None
    # core/lease/signatures.py
    pdrelay_signature: Annotated[str, Meta(max_length=MAX_SIGNATURE)] | None = None
    # The host that was signed. It is not signed itself, and only tells why another one is refused.
    pdrelay_host: Annotated[str, Meta(max_length=255)] | None = None

    @property
    def address(self) -> Address:
        """The side channel of the prefill engine."""
        return Address(self.remote_host, self.remote_port)

    def to_params(self) -> dict[str, Any]:
        """Return the JSON object that the router passes on to the decode engine."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {"do_remote_prefill": True, "do_remote_decode": False, **fields}


class PushParams(msgspec.Struct, frozen=True):
    """The prefill engine that will write a request's KV, and the transfer's id."""

    remote_engine_id: EngineId
    remote_host: Annotated[str, Meta(min_length=1, max_length=255)]
    remote_port: Annotated[int, Meta(gt=0, lt=65536)]
    transfer_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID)] | None = None
    remote_request_id: RequestName = RequestId("")  # the transfer id, set by parse_push_params

    @property
    def address(self) -> Address:
        """The side channel of the prefill engine."""
        return Address(self.remote_host, self.remote_port)


def parse_push_params(params: Mapping[str, Any], own: str) -> PushParams:
    """Parse a router's params of a push; raises :exc:`~pdrelay_connector.errors.InvalidKvParams`.

    ``own`` is vLLM's id of the request on this engine.
    """
    named = {name: value for name, value in params.items() if name != "remote_request_id"}
    parsed = _parse(named, PushParams, "remote_engine_id", "remote_host", "transfer_id")
    if params.get("transfer_mode", "push") != "push":
        raise InvalidKvParams(
            f"kv_transfer_params: transfer_mode is {params['transfer_mode']!r}, this engine takes "
            f"'push' only"
        )
    name = parsed.transfer_id or common_id(own)
    if len(name) > MAX_ID:
        raise InvalidKvParams(f"the request's id has {len(name)} characters, {MAX_ID} are allowed")
    return msgspec.structs.replace(parsed, remote_request_id=RequestId(name))


def says_push(params: Mapping[str, Any]) -> bool:
    """Whether a router has chosen push, for engines with ``"mode": "auto"``.

    Others say nothing, and mean pull.
    """
    return params.get("transfer_mode") == "push"


def parse_transfer_id(params: Mapping[str, Any], own: str) -> RequestId:
    """Return the id of the transfer that P computes a prompt for.

    Raises :exc:`~pdrelay_connector.errors.InvalidKvParams`.
    """
    name = params.get("transfer_id") or common_id(own)
    if not isinstance(name, str) or len(name) > MAX_ID or not name.isprintable():
        raise InvalidKvParams(
            f"kv_transfer_params: transfer_id must be printable text of at most {MAX_ID} characters"
        )
    return RequestId(name)


def common_id(own: str) -> str:
    """Return a request id without the suffix that vLLM adds on each engine."""
    return re.sub(r"-[0-9a-f]{8}$", "", own)


def parse_pull_params(params: Mapping[str, Any]) -> PullParams:
    """Parse P's params of a pull; raises :exc:`~pdrelay_connector.errors.InvalidKvParams`."""
    parsed = _parse(
        params,
        PullParams,
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "pdrelay_prompt",
        "pdrelay_adapter",
        "transfer_id",
        "pdrelay_host",
    )
    if parsed.transfer_mode != "pull":
        raise InvalidKvParams(
            f"kv_transfer_params: transfer_mode is {parsed.transfer_mode!r}, this engine reads "
            f"'pull' only"
        )
    if not 0 < parsed.remote_port < 65536:
        raise InvalidKvParams(
            f"kv_transfer_params: remote_port is {parsed.remote_port}, not a TCP port"
        )
    if not 0 < sum(map(len, parsed.remote_block_ids)) <= MAX_BLOCKS:
        raise InvalidKvParams(
            f"kv_transfer_params: remote_block_ids names no block, or more than {MAX_BLOCKS}"
        )
    return parsed


def _parse(params: Mapping[str, Any], kind: type[_Params], *texts: str) -> _Params:
    """Parse params; ``texts`` are the fields that go into messages, logs and digests."""
    try:
        parsed = _convert(params, kind)
    except msgspec.ValidationError as exc:
        raise InvalidKvParams(f"kv_transfer_params: {exc}") from exc
    for name in texts:
        # no line break, which would forge a line of a log, and no half of a surrogate pair
        if not (getattr(parsed, name) or "").isprintable():
            raise InvalidKvParams(f"kv_transfer_params: {name} must be printable text")
    return parsed


def _convert(params: Mapping[str, Any], kind: type[_Params]) -> _Params:
    """Convert params; a router in a language without integers may have written 5600.0 for 5600."""
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError:
        return msgspec.convert(
            {name: _with_integers(value) for name, value in params.items()}, kind
        )


def _with_integers(value: object, depth: int = 2) -> object:
    """Return a value with integers for whole floats, also in lists of lists, but no deeper."""
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
        return int(value)
    if isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
        return [_with_integers(item, depth - 1) for item in items] if depth else items
    return value


def digest_prompt(
    token_ids: Sequence[int] | None, features: Iterable[str], salt: str | None
) -> str | None:
    """Return a digest of all that decides the prompt's KV; None for a prompt without token ids.

    P sends it and D compares it: if a router mixes up prompts, retries or ids, D computes the
    prompt itself. ``features`` are vLLM's hashes of multimodal inputs.
    """
    if token_ids is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.msgpack.encode((token_ids, list(features), salt)))
    return digest.hexdigest()
