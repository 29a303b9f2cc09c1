"""The nouns of the router.

Those that every request makes have an ``__init__`` of their own: that of a dataclass stays Python
where the rest of it is compiled (see docs/performance.md).
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
    for each, value in headers:
        if each == name:
            return value
    return None


class Role(FastStrEnum):
    """Which half of a request an engine serves."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineRole(FastStrEnum):
    """Which requests an engine gets: what it was declared as, until it turns."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"  # the one leg of one request and the other leg of another

    def serves(self, role: Role) -> bool:
        """Tell whether it gets legs of this role."""
        return self is EngineRole.BOTH or self.value == role.value


class Api(FastStrEnum):
    """The calls that generate text, and so have two legs; the value is the path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    GENERATE = "/inference/v1/generate"


_PATHS: Final = {api: api.value for api in Api}  # an enum's ``value`` is a Python function


class SingleEngineReason(FastStrEnum):
    """Why a request is served by one decode engine, without a transfer, as metrics and headers name
    it.
    """

    PROMPTS = "several_prompts"
    EMBEDS = "prompt_embeds"
    N = "n"  # more than one
    BEST_OF = "best_of"  # more than one
    BEAM = "use_beam_search"
    ECHO = "echo"
    PROMPT_LOGPROBS = "prompt_logprobs"
    FEW_TOKENS = "max_tokens"  # less than two
    TRUNCATED = "truncate_prompt_tokens"
    STORED = "previous_response_id"  # an earlier answer, which one engine may remember
    # the engine generates several times, and would read the same blocks each time
    TOOLS = "built_in_tools"
    UNUSUAL = "unusual_value"
    SHORT = "short_prompt"
    CACHED = "cached_prompt"  # the decode engine has nearly all of it
    # the decode engine is expected to be faster than a prefill engine and a transfer
    FASTER = "faster_alone"
    ONE_LEG = "one_leg"  # a call that generates no text
    UNKNOWN_MODEL = "unknown_model"  # it names none, and no engine has said which one it serves
    NO_PREFILL = "no_prefill_engine"
    # some fit, and too few of one role: a rollout is ahead there
    FEW_MATCH = "few_matching_engines"
    PREFILL_FAILED = "prefill_failed"  # no other prefill engine was left for a retry
    # there are some, and their KV cache is of no use to a decode engine
    NO_MATCH = "no_matching_prefill_engine"


class LegOrder(FastStrEnum):
    """In which order the legs of a request went out, where that was not one after the other to read
    the KV cache.
    """

    CONCURRENT = "push"  # the prefill engine pushes
    SEQUENTIAL = "push_cold"  # it pushes, and the router does not know yet where to find it
    EACH_PROMPT = "each_prompt"  # the request has several prompts, and each of them legs of its own


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
    declared: Role | None = None  # as it was added, if it has turned since; None: as it serves

    @property
    def pool(self) -> Role:
        """The role it was added with: which key it wants, and what other routers call it, go by
        that.
        """
        return self.role if self.declared is None else self.declared


@dataclass(slots=True, init=False)
class RoutingHints:
    """What the choice of engines may depend on: as much of a request as matters for it.

    It does not change.
    """

    model: str | None  # the model it names
    session: str | None  # the id of the conversation it belongs to, if a policy asks for it
    # the prompt (or messages) as JSON text, as it came; empty: not looked at
    prompt: bytes | memoryview
    tokens: int | None  # length of the prompt; None: unknown
    rank: int | None  # the client's X-data-parallel-rank: the rank of the engine that decodes
    again: bool  # it has failed before, at another engine
    # the other fields of the request
    context: Mapping[str, msgspec.Raw] = field(compare=False, repr=False)
    # since a policy has asked for them
    _blocks: PromptBlocks | None = field(compare=False, repr=False)

    def __init__(
        self,
        model: str | None = None,
        session: str | None = None,
        prompt: bytes | memoryview = b"",
        tokens: int | None = None,
        rank: int | None = None,
        *,
        again: bool = False,
        context: Mapping[str, msgspec.Raw] = _NO_CONTEXT,
    ) -> None:
        self.model = model
        self.session = session
        self.prompt = prompt
        self.tokens = tokens
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
        """Return the same for a request that has failed before."""
        return self._with(self.model, again=True)

    def for_model(self, model: str | None) -> "RoutingHints":
        """Return the same for a request that has named none: an engine tells which one it means."""
        return self._with(model, again=self.again)

    def _with(self, model: str | None, *, again: bool) -> "RoutingHints":
        hints = RoutingHints(
            model, self.session, self.prompt, self.tokens, self.rank, again=again, context=self.context
        )  # fmt: skip
        hints._blocks = self._blocks
        return hints


ANY: Final = RoutingHints()  # no wish at all


@dataclass(slots=True, init=False)
class GenerationRequest:
    """What a client asked for, after the checks that make it safe to pass on.

    It does not change.
    """

    api: Api
    fields: Fields
    headers: Headers  # those of the client's headers that engines may see
    rank: int | None  # the client's X-data-parallel-rank, for the decode leg
    shared: Sequence[str]  # fields with long values, but for the prompt: all legs share their bytes

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

    @property
    def path(self) -> str:
        """Where the engines take it."""
        return _PATHS[self.api]


@dataclass(frozen=True, slots=True)
class PassthroughRequest:
    """What a client asked for that one engine does in one leg; the body is passed through."""

    path: str
    body: bytes
    headers: Headers
    content_type: bytes = b"application/json"
    model: str | None = None  # the model it names
    rank: int | None = None


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
    """An engine's whole answer. It does not change."""

    status: int
    content_type: str
    body: bytes
    load: bytes  # its endpoint-load-metrics header: how busy the engine is; empty: it does not say

    def __init__(self, status: int, content_type: str, body: bytes, load: bytes = b"") -> None:
        self.status = status
        self.content_type = content_type
        self.body = body
        self.load = load


@dataclass(slots=True, init=False)
class PrefillResult:
    """What a prefill engine's answer is good for. It does not change."""

    params: msgspec.Raw  # for the decode leg that follows it
    coordinates: Coordinates | None  # for later requests; None: this engine does not push
    counted: int | None  # tokens of the prompt; None: it does not say
    transfer: TransferId | None  # None: this engine does not push
    # the host that it named, where nobody can reach it; None: what it named stands
    replaced: str | None
    offer: msgspec.Raw  # what it says of its first token, if it does not push
    read: TokensAnswer | None  # the answer, if it was asked for token ids
    looks_back: bool  # no other engine goes on exactly with its streams
    # the prompt's, as JSON, for the decode leg; null: it was not asked for them, or tells none
    ids: msgspec.Raw
    may_tell_cache: bool  # its usage may say what the engine had in its cache

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
