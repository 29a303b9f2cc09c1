"""The parameters for a decode engine whose prefill engine writes the KV cache into its memory
(push).

In pull mode the decode engine gets the parameters in the prefill engine's answer. In push mode it
can start before there is an answer: it only needs the prefill engine's address, and the name under
which both know the request. Every earlier answer of that engine has its address, so the first
request goes to one engine after the other, and from then on both legs go out at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from pdrelay_proxy.core.model import Api, RequestId, TransferId
from pdrelay_proxy.core.raw_json import encode_text
from pdrelay_proxy.core.schemas import Coordinates
from pdrelay_proxy.settings import KvTransferMode


class TransferMode(StrEnum):
    """Who moves the KV cache, in an engine's words; an unknown word means pull."""

    PULL = "pull"
    PUSH = "push"


class EngineMode(StrEnum):
    """How an engine was started."""

    PULL = "pull"
    PUSH = "push"
    AUTO = "auto"  # it can do either, as the router decides for each request


_DECODE_PARAMS: Final = b"".join(
    [
        b',"remote_request_id":%b,"transfer_id":%b,"transfer_mode":"push"',
        b',"do_remote_prefill":true,"do_remote_decode":false}',
    ]
)


@dataclass(frozen=True, slots=True)
class TransferPolicy:
    """How the router treats what prefill engines report about transfers."""

    unsaid: TransferMode  # of an engine that does not name its mode
    accepted: frozenset[TransferMode]
    at_once: bool  # both legs, as soon as the prefill engine is known to push
    fixed: TransferMode | None  # of engines that can do either; None: the router tries both


_EITHER: Final = frozenset(TransferMode)
TRANSFER_POLICIES: Final[Mapping[KvTransferMode, TransferPolicy]] = {
    KvTransferMode.AUTO: TransferPolicy(TransferMode.PULL, _EITHER, at_once=True, fixed=None),
    KvTransferMode.PULL: TransferPolicy(
        TransferMode.PULL, _EITHER, at_once=False, fixed=TransferMode.PULL
    ),
    KvTransferMode.PUSH: TransferPolicy(
        TransferMode.PUSH, frozenset({TransferMode.PUSH}), at_once=True, fixed=TransferMode.PUSH
    ),
}


# Engines put these around our X-Request-Id (``_base_request_id`` in
# vllm/entrypoints/serve/engine/serving.py), and append a suffix of their own.
_NAMES: Final[Mapping[Api, str]] = {
    Api.COMPLETIONS: "cmpl-{}-0",
    Api.CHAT: "chatcmpl-{}",
    Api.RESPONSES: "resp_{}_0",  # from the body's request_id
    Api.MESSAGES: "chatcmpl-{}",
    Api.GENERATE: "generate-tokens-{}",
}


def known_as(api: Api, request: RequestId) -> str:
    """Return the name by which vLLM's engines know a request, without their suffixes."""
    return _NAMES[api].format(request)


def decode_params(
    coordinates: Coordinates, api: Api, request: RequestId, transfer: TransferId
) -> msgspec.Raw:
    """Return the parameters for a decode engine before its prefill engine has answered."""
    names = encode_text(known_as(api, request)), encode_text(transfer)
    return msgspec.Raw(msgspec.json.encode(coordinates)[:-1] + _DECODE_PARAMS % names)
