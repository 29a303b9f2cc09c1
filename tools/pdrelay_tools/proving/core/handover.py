"""The bodies of both legs of a request, as a router writes them (kv_transfer_params of vLLM)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pdrelay_proxy.core.model import Api, RequestId
from pdrelay_proxy.core.protocol.push import known_as
from pdrelay_tools.proving.core.answer import Malformed
from pdrelay_tools.proving.core.question import Json, Question, Shape

_ASKING: Final = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
_ONE_TOKEN: Final[Mapping[Shape, Json]] = {
    Shape.TEXT: {"max_tokens": 1, "min_tokens": 1},
    Shape.IDS: {"max_tokens": 1, "min_tokens": 1},
    Shape.CHAT: {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1},
}
_ONLY_FOR_DECODE: Final = ("logprobs", "top_logprobs", "stream_options", "stream", "n")
_COORDINATES: Final = (
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "pp_size",
    "dcp_size",
)


class _PrefilledAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True)
class Handover:
    """The kv_transfer_params of a prefill engine's answer, with which a decode engine gets KV."""

    raw: msgspec.Raw  # as it was sent: a router passes it on byte for byte
    params: Json

    @property
    def is_push(self) -> bool:
        """Whether the prefill engine writes."""
        return self.params.get("transfer_mode") == "push"

    def coordinates(self) -> Json:
        """Return the engine's coordinates, for decode legs that are sent before its answer."""
        return {name: self.params[name] for name in _COORDINATES if name in self.params}


def prefill_body(question: Question, model: str, transfer: str) -> Json:
    """Return the body of a prefill leg: the fields that shape the KV, and one token."""
    body = {
        name: value for name, value in question.body(model).items() if name not in _ONLY_FOR_DECODE
    }
    params = {**_ASKING, "transfer_id": transfer}
    return body | _ONE_TOKEN[question.shape] | {"stream": False, "kv_transfer_params": params}


def decode_body(question: Question, model: str, params: Json | msgspec.Raw) -> Json:
    """Return the body of a decode leg, with the params of its prefill leg."""
    return question.body(model) | {"kv_transfer_params": params}


def read_handover(body: bytes) -> Handover:
    """Read a prefill engine's answer; raises Malformed: it has no kv_transfer_params."""
    try:
        raw = msgspec.json.decode(body, type=_PrefilledAnswer).kv_transfer_params
        params = msgspec.json.decode(raw, type=dict[str, Any] | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise Malformed(f"{exc}") from exc
    if not params:
        raise Malformed(
            "the prefill engine's answer has no kv_transfer_params: has it a KV connector?"
        )
    return Handover(raw, params)


def with_transfer(handover: Handover, transfer: str) -> Json | msgspec.Raw:
    """Return the params of a decode leg that is sent after its prefill leg's answer."""
    return handover.params | {"transfer_id": transfer} if handover.is_push else handover.raw


def push_params(coordinates: Json, question: Question, request: str, transfer: str) -> Json:
    """Return the params of a decode leg that is sent together with its prefill leg."""
    api = Api.CHAT if question.shape is Shape.CHAT else Api.COMPLETIONS
    fields = {
        "remote_request_id": known_as(api, RequestId(request)),
        "transfer_id": transfer,
        "transfer_mode": "push",
    }
    return coordinates | fields | {"do_remote_prefill": True, "do_remote_decode": False}
