"""What clients and operators send and get, as pydantic models: FastAPI checks and documents with them.

A request of a client is only described here. Its bytes go to the engines as they came, and core/ reads the few fields
that the router looks at: a model that parsed them would reject what vLLM accepts, and would cost every request.
"""

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from xpyd_proxy.core.model import Role

_HEADERS_MOST: Final = 64

Name: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=300)]
HeaderName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256)]
HeaderValue: TypeAlias = Annotated[str, StringConstraints(max_length=8192)]
JsonObject: TypeAlias = dict[str, Any]
# A value that is kept as the bytes that came: reading and writing it again would change numbers and escapes.
RawObject: TypeAlias = Annotated[msgspec.Raw, WithJsonSchema({"type": "object", "additionalProperties": True})]


# What operators send


class InstanceName(BaseModel):
    """Which engine: by id, or by role and address as in /instances/add (then every rank there)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Name | None = Field(None, examples=["decode-0"])
    type: Role | None = None
    instance: Name | None = Field(None, examples=["10.0.0.7:8000"])


class NewInstance(BaseModel):
    """An engine to add, in the format of vLLM's own proxy demo, which ignores other fields."""

    model_config = ConfigDict(frozen=True)

    type: Role
    instance: Annotated[Name, StringConstraints(pattern=":")] = Field(
        examples=["10.0.0.7:8000", "10.0.0.7:8000#dp=4"], description="HOST:PORT; with #dp=N each of its N ranks"
    )


class ExplainRequest(BaseModel):
    """The request that a client would send."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    path: Name = Field(examples=["/v1/completions"])
    body: RawObject
    headers: dict[HeaderName, HeaderValue] = Field(default={}, max_length=_HEADERS_MOST)


# What operators get


class OperatorError(BaseModel):
    """An error of a route for operators: FastAPI's own shape."""

    detail: str = Field(description="What is wrong, in one sentence")


class InstanceAdded(BaseModel):
    """The answer of vLLM's own proxy demo."""

    message: str = Field(examples=["Added 10.0.0.7:8000 to decode_instances."])


class FleetStatus(BaseModel):
    """The answer of vLLM's own proxy demo."""

    prefill_node_count: int
    decode_node_count: int
    prefill_nodes: list[str]
    decode_nodes: list[str]


class InstanceRow(BaseModel):
    """One engine as operators see it."""

    id: str
    role: Role
    address: str
    rank: int | None
    state: str
    why: str
    since_s: float = Field(description="seconds in this state")
    in_flight: int
    load: float
    models: list[str] | None
    version: str | None
    connector: str | None
    mode: str | None
    revision: str | None
    protocol: str | None = Field(description="of xpyd's connector, as it says; so is the fingerprint")
    fingerprint: str | None
    source: str = Field(description="who wants it here: static, pods or store")
    generation: int = Field(description="of that source's view, when it first named the engine")


class InstanceList(BaseModel):
    """Engines."""

    instances: list[InstanceRow]


class ExplainResponse(BaseModel):
    """What would become of a request: the rule, the engines, and what each would get."""

    rule: str
    prefill: str | None
    decode: str
    prefill_body: JsonObject | None
    decode_body: JsonObject
    prompt_bytes: int
    cached_bytes: dict[str, int] = Field(description="Bytes of the prompt that each engine has, as far as is known")
    cached_tokens: dict[str, int] = Field(
        description="Tokens of the prompt that each engine has by its own KV events, of those that tell (kv_events); "
        "of a text or a chat those of the beginning whose tokens are known"
    )
    cached_known_by: dict[str, str] = Field(
        description="How it is known what each engine has: events, events_and_sent (of the beginning, and the rest by "
        "what was sent to it), sent"
    )
    min_split_new_bytes: int
    lone_prompt_bytes: dict[str, int] = Field(
        description="New bytes of prompts that decode engines compute alone now, of those that do"
    )
    lone_prompt_bound: Literal["moved", "split"] | None = Field(
        description="Whether a decode engine that has nearly all of the prompt leaves it to another one (moved) or to "
        "a prefill engine (split), because its streams would wait for too long"
    )
    expected_ms: dict[str, float] | None = Field(
        description="Milliseconds that the request is expected to wait for its first token, by term (expected_ttft)"
    )


# What everybody gets


class Health(BaseModel):
    """Whether the router has an engine of each role, or should be sent requests."""

    status: Literal["ok", "ready"]


class ErrorDetail(BaseModel):
    """What is wrong, in the shape of OpenAI's API."""

    message: str
    type: str
    param: str | None = Field(description="The field of the body that is wrong")
    code: int = Field(description="The status")


class ErrorResponse(BaseModel):
    """An error of a route for clients."""

    error: ErrorDetail


class ServedModel(BaseModel):
    """A model, as the engine that serves it describes it."""

    model_config = ConfigDict(extra="allow")

    id: str


class ServedModels(BaseModel):
    """The models of all engines that answer."""

    object: Literal["list"]
    data: list[ServedModel]


# What clients send: the fields that the router looks at, and any other


class ForwardedHeaders(BaseModel):
    """The headers that mean something to the router."""

    x_request_id: str | None = Field(None, description="the client's name of the request; answer and log repeat it")
    x_session_id: str | None = Field(
        None,
        description="requests with the same one go to the same engine (session); docs/routing.md lists other names",
    )
    x_data_parallel_rank: int | None = Field(None, ge=0, description="the rank of the engine that decodes")
    x_vllm_priority: int | None = Field(
        None, description="requests with a lower one come first where some have to wait"
    )


class EngineRequest(BaseModel):
    """A request that one decode engine serves; all of it goes there as it came."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    priority: int | None = Field(None, description="X-vLLM-Priority counts before it")


class GenerateRequest(EngineRequest):
    """A request for text. Fields that are not named here go to the engines as they came."""

    stream: bool | None = None
    vllm_xargs: JsonObject | None = None


class _OpenAIRequest(GenerateRequest):
    """What completions and chats have in common."""

    n: int | None = Field(None, ge=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stream_options: JsonObject | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    best_of: int | None = None
    use_beam_search: bool = False
    echo: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_embeds: Any = None


class CompletionRequest(_OpenAIRequest):
    """A text to go on with."""

    prompt: str | list[Any]


class ChatCompletionRequest(_OpenAIRequest):
    """A chat."""

    messages: list[JsonObject]


class TokensRequest(GenerateRequest):
    """Token ids to go on with: the answer has token ids, too."""

    token_ids: list[int]
    sampling_params: JsonObject
    stream_options: JsonObject | None = None


class ResponsesRequest(GenerateRequest):
    """A request in the Responses API."""

    input: str | list[Any]
    max_output_tokens: int | None = None
    tools: list[JsonObject] | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: Literal[False] | None = Field(None, description="such answers cannot be fetched through the router")


class MessagesRequest(GenerateRequest):
    """A request in the Messages API."""

    messages: list[JsonObject]
    max_tokens: int
    thinking: JsonObject | None = None
