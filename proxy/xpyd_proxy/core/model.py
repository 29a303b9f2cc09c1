"""The nouns of the router."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, TypeAlias

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.raw_json import Fields

InstanceId = NewType("InstanceId", str)
RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", str)
Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]


class Role(StrEnum):
    """Which half of a request an engine serves."""

    PREFILL = "prefill"
    DECODE = "decode"


class Api(StrEnum):
    """The two OpenAI calls that generate text; the value is the path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class Solo(StrEnum):
    """Why a request is served by one decode engine, without a transfer."""

    PROMPTS = "several prompts"
    EMBEDS = "prompt_embeds"
    N = "n>1"
    BEST_OF = "best_of>1"
    BEAM = "use_beam_search"
    ECHO = "echo"
    PROMPT_LOGPROBS = "prompt_logprobs"
    FEW_TOKENS = "max_tokens<2"
    TRUNCATED = "truncate_prompt_tokens"
    UNUSUAL = "unusual value"


class Push(StrEnum):
    """In which order the legs of a request went out whose prefill engine pushes."""

    AT_ONCE = "push"
    IN_TURN = "push, prefill first"  # as long as the router does not know where to find the prefill engine


@dataclass(frozen=True, slots=True)
class Instance:
    """One vLLM engine. Its id is what clients and logs see; its address stays inside."""

    id: InstanceId
    role: Role
    address: Address


@dataclass(frozen=True, slots=True)
class Call:
    """What a client asked for, after the checks that make it safe to pass on."""

    api: Api
    fields: Fields
    headers: Headers  # those of the client's headers that engines may see


@dataclass(frozen=True, slots=True)
class Leg:
    """One request to one engine."""

    instance: Instance
    path: str
    body: bytes
    headers: Headers


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's whole answer."""

    status: int
    content_type: str
    body: bytes
