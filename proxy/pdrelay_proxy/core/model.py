"""The nouns of the router.

Classes that every request uses have an ``__init__`` of their own: mypyc does not compile a
dataclass's (docs/performance.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NewType, TypeAlias

import msgspec

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.prompt_blocks import PromptBlocks
from pdrelay_proxy.core.raw_json import NULL, Fields
from pdrelay_proxy.core.schemas import Coordinates, TokensAnswer

InstanceId = NewType("InstanceId", str)
RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", str)
Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
_NO_CONTEXT: Final[Mapping[str, msgspec.Raw]] = {}


def first_header(headers: Headers, name: bytes) -> bytes | None:
    """Return the value of the first header of this name (in lower case, as the headers' are); None:
    there is none.
    """
    for header_name, value in headers:
        if header_name == name:
            return value
    return None


class Role(FastStrEnum):
    """The half of a request that an engine serves."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineRole(FastStrEnum):
    """The requests that an engine gets."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"  # prefill legs of some requests, decode legs of others

    def serves(self, role: Role) -> bool:
        """Return whether it gets legs of this role."""
        return self is EngineRole.BOTH or self.value == role.value


class Api(FastStrEnum):
    """The endpoints that generate text, and so have two legs; the value is the path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    GENERATE = "/inference/v1/generate"


class SingleEngineReason(FastStrEnum):
    """Why one decode engine serves a request without a transfer, as metrics and headers name it."""

    PROMPTS = "several_prompts"
    EMBEDS = "prompt_embeds"
    N = "n"  # more than one
    BEST_OF = "best_of"  # more than one
    BEAM = "use_beam_search"
    ECHO = "echo"
    PROMPT_LOGPROBS = "prompt_logprobs"
    FEW_TOKENS = "max_tokens"  # less than two
    TRUNCATED = "truncate_prompt_tokens"
    STORED = "previous_response_id"  # an earlier answer, which one engine may have stored
    # the engine generates several times, and would read the same blocks each time
    TOOLS = "built_in_tools"
    UNUSUAL = "unusual_value"
    SHORT = "short_prompt"
    CACHED = "cached_prompt"  # the decode engine has nearly the whole prompt
    # the decode engine is expected to be faster than a prefill engine and a transfer
    FASTER = "faster_alone"
    ONE_LEG = "one_leg"  # a call that generates no text
    UNKNOWN_MODEL = "unknown_model"  # it names none, and no engine has named the one that it serves
    NO_PREFILL = "no_prefill_engine"
    # too few engines of one role fit: a rollout is ahead in the other
    FEW_MATCH = "few_matching_engines"
    PREFILL_FAILED = "prefill_failed"  # no other prefill engine was left for a retry
    # prefill engines are there, and no decode engine can use their KV cache
    NO_MATCH = "no_matching_prefill_engine"


class LegOrder(FastStrEnum):
    """How the legs of a request were sent, if not one after the other to read the KV cache."""

    CONCURRENT = "push"  # the prefill engine pushes
    SEQUENTIAL = "push_cold"  # it pushes, and the router does not know its push coordinates yet
    EACH_PROMPT = "each_prompt"  # the request has several prompts, each with legs of its own


@dataclass(frozen=True, slots=True)
class Instance:
    """One vLLM engine, as it serves one role.

    Its id is what clients and logs see; its address stays inside.
    """

    id: InstanceId
    role: Role
    address: Address
    # data-parallel rank that its legs ask for (X-data-parallel-rank); None: the engine chooses
    rank: int | None = None
    declared: Role | None = (
        None  # the declared role, if it has changed since; None: the present role
    )

    @property
    def pool(self) -> Role:
        """The role it was declared with. Its API key and its name at other routers depend on this,
        not on the present role.
        """
        return self.role if self.declared is None else self.declared


@dataclass(slots=True, init=False)
class RoutingHints:
    """The part of a request on which the choice of engines may depend. It is never changed."""

    model: str | None  # the requested model
    session: str | None  # the id of its conversation, if a policy uses it
    # the prompt (or messages) as JSON text, as it came; empty: unused
    prompt: bytes | memoryview
    rank: int | None  # the client's X-data-parallel-rank: the rank of the engine that decodes
    again: bool  # it failed before at another engine
    # the other fields of the request
    context: Mapping[str, msgspec.Raw] = field(compare=False, repr=False)
    # computed when a policy first needs them
    _blocks: PromptBlocks | None = field(compare=False, repr=False)

    def __init__(
        self,
        model: str | None = None,
        session: str | None = None,
        prompt: bytes | memoryview = b"",
        rank: int | None = None,
        *,
        again: bool = False,
        context: Mapping[str, msgspec.Raw] = _NO_CONTEXT,
    ) -> None:
        self.model = model
        self.session = session
        self.prompt = prompt
        self.rank = rank
        self.again = again
        self.context = context
        self._blocks = None

    @property
    def blocks(self) -> PromptBlocks:
        """The blocks of the prompt."""
        blocks = self._blocks
        if blocks is None:
            blocks = self._blocks = PromptBlocks(self.prompt, self.context)
        return blocks

    def once_more(self) -> "RoutingHints":
        """Return the hints of the same request after a failure."""
        return self._with(self.model, again=True)

    def for_model(self, model: str | None) -> "RoutingHints":
        """Return the hints of a request without a model, with the model that its engine serves."""
        return self._with(model, again=self.again)

    def _with(self, model: str | None, *, again: bool) -> "RoutingHints":
        hints = RoutingHints(
            model, self.session, self.prompt, self.rank, again=again, context=self.context
        )
        hints._blocks = self._blocks
        return hints


ANY: Final = RoutingHints()  # no preference at all


@dataclass(slots=True, init=False)
class GenerationRequest:
    """A client's request, after the checks that make it safe to pass on. It is never changed."""

    api: Api
    fields: Fields
    headers: Headers  # the client's headers that engines may see
    rank: int | None  # the client's X-data-parallel-rank, for the decode leg
    shared: Sequence[str]  # fields with long values, except the prompt: all legs share their bytes

    def __init__(
        self,
        api: Api,
        fields: Fields,
        headers: Headers,
        rank: int | None = None,
        shared: Sequence[str] = (),
    ) -> None:
        self.api = api
        self.shared = shared
        self.fields = fields
        self.headers = headers
        self.rank = rank

    def with_fields(self, fields: Fields) -> "GenerationRequest":
        """Return the request with other fields."""
        return GenerationRequest(self.api, fields, self.headers, self.rank, self.shared)


@dataclass(frozen=True, slots=True)
class LegRequest:
    """One request to one engine."""

    instance: Instance
    path: str
    body: bytes
    headers: Headers
    content_type: bytes = b"application/json"


@dataclass(slots=True, init=False)
class EngineResponse:
    """An engine's whole answer. It is never changed."""

    status: int
    content_type: str
    body: bytes
    load: bytes  # its endpoint-load-metrics header (ORCA, vllm/entrypoints/serve/utils/orca_metrics.py)

    def __init__(self, status: int, content_type: str, body: bytes, load: bytes = b"") -> None:
        self.status = status
        self.content_type = content_type
        self.body = body
        self.load = load


@dataclass(slots=True, init=False)
class PrefillResult:
    """The usable parts of a prefill engine's answer. It is never changed."""

    params: msgspec.Raw  # for the decode leg that follows it
    coordinates: Coordinates | None  # for later requests; None: this engine does not push
    counted: int | None  # tokens of the prompt; None: unknown
    transfer: TransferId | None  # None: this engine does not push
    # a host in its answer that other machines cannot reach; None: it named a usable host
    replaced: str | None
    offer: msgspec.Raw  # its ``pdrelay_first_token``, if it does not push
    read: TokensAnswer | None  # the parsed answer, if it was asked for token ids
    looks_back: bool  # no other engine can continue its streams exactly
    # the prompt's token ids as JSON, for the decode leg; null: not requested, or not in the answer
    ids: msgspec.Raw
    may_tell_cache: bool  # its usage may have the cached tokens

    def __init__(  # noqa: PLR0917 (by name they cost several hundred instructions more)
        self,
        params: msgspec.Raw,
        coordinates: Coordinates | None,
        counted: int | None = None,
        transfer: TransferId | None = None,
        replaced: str | None = None,
        offer: msgspec.Raw = NULL,
        read: TokensAnswer | None = None,
        looks_back: bool = False,  # noqa: FBT001, FBT002
        ids: msgspec.Raw = NULL,
    ) -> None:
        self.params = params
        self.ids = ids
        self.may_tell_cache = True
        self.replaced = replaced
        self.coordinates = coordinates
        self.counted = counted
        self.transfer = transfer
        self.offer = offer
        self.read = read
        self.looks_back = looks_back
