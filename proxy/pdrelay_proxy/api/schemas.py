"""What clients and operators send and get, as pydantic models: FastAPI checks and documents with
them.

A request of a client is only described here. Its bytes go to the engines as they came, and core/
reads the few fields that the router looks at: a model that parsed them would reject what vLLM
accepts, and would cost every request.
"""

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from pdrelay_proxy.api.endpoint_document import describe_request
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.model import Api, EngineRole, Role

_HEADERS_MOST: Final = 64
_ADDRESS: Final[dict[str, Any]] = {
    "pattern": r"^(https?://)?[^\s/@#?]+:[0-9]{1,5}(#dp=[1-9][0-9]*)?$"
}

Name: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=300)]
HeaderName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256)]
HeaderValue: TypeAlias = Annotated[str, StringConstraints(max_length=8192)]
JsonObject: TypeAlias = dict[str, Any]
Absent: TypeAlias = SkipJsonSchema[None]  # a header cannot be null
# A value that is kept as the bytes that came: reading and writing it again would change numbers and
# escapes.
RawObject: TypeAlias = Annotated[
    msgspec.Raw, WithJsonSchema({"type": "object", "additionalProperties": True})
]


# What operators send


class InstanceName(BaseModel):
    """Which engine: by id, or by role and address as in /instances/add (then every rank there)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"id": "decode-0"}]}
    )

    id: Name | None = Field(None, examples=["decode-0"])
    type: Role | None = None
    instance: Annotated[Name, Field(json_schema_extra=_ADDRESS)] | None = Field(
        None, examples=["10.0.0.7:8000"]
    )


class DrainedInstance(InstanceName):
    """Which engine is drained, and how."""

    move: bool = Field(
        default=False, description="its streams go on at other engines, where that is exact"
    )


class TurnedInstance(InstanceName):
    """Which engine turns, and to what."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": "decode-0", "to": "prefill"}]})

    to: EngineRole = Field(description="what it serves as soon as nothing of its old role is left")
    force: bool = Field(
        default=False, description="also if it is the last engine that serves its old role"
    )


class NewInstance(BaseModel):
    """An engine to add, in the format of vLLM's own proxy demo, which ignores other fields."""

    model_config = ConfigDict(frozen=True)

    type: Role
    instance: Annotated[Name, StringConstraints(pattern=":")] = Field(
        json_schema_extra=_ADDRESS,
        examples=["10.0.0.7:8000", "10.0.0.7:8000#dp=4"],
        description="HOST:PORT; with #dp=N each of its N ranks",
    )


class ExplainRequest(BaseModel):
    """The request that a client would send."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        json_schema_extra={
            "examples": [{"path": Api.COMPLETIONS.value, "body": {"prompt": "Once upon a time"}}]
        },
    )

    path: Annotated[Name, WithJsonSchema({"type": "string", "enum": [api.value for api in Api]})]
    body: RawObject
    headers: dict[HeaderName, HeaderValue] = Field(default={}, max_length=_HEADERS_MOST)


# What operators get


class OperatorError(BaseModel):
    """An error of a route for operators: FastAPI's own shape."""

    detail: str = Field(description="What is wrong, in one sentence")


class InstanceAdded(BaseModel):
    """The answer of vLLM's own proxy demo, and a warning where there is one."""

    message: str = Field(examples=["Added 10.0.0.7:8000 to decode_instances."])
    warning: str | None = Field(
        None, description="Why it shares no request with any engine of the other role"
    )


class FleetStatus(BaseModel):
    """The answer of vLLM's own proxy demo."""

    prefill_node_count: int
    decode_node_count: int
    prefill_nodes: list[str]
    decode_nodes: list[str]


class InstanceRow(BaseModel):
    """One engine as operators see it."""

    id: str
    role: EngineRole = Field(description="what it serves now")
    declared: Role = Field(
        description="what its source names it as; it names the engine in requests of operators"
    )
    turns_to: EngineRole | None = Field(
        description="what it serves as soon as nothing of its role is left"
    )
    address: str
    rank: int | None
    state: HealthState
    why: str
    since_s: float = Field(description="seconds in this state")
    in_flight: int
    load: float
    models: list[str] | None
    version: str | None
    connector: str | None
    mode: str | None
    revision: str | None
    slice: str | None = Field(description="its zone, rack or NVLink domain (pdrelay/slice)")
    protocol: str | None = Field(
        description="of pdrelay's connector, as it says; so is the fingerprint"
    )
    fingerprint: str | None
    source: str = Field(description="who wants it here: static, pods or store")
    generation: int = Field(description="of that source's view, when it first named the engine")
    warning: str | None = Field(default=None, description="what is wrong with it in this fleet")


class InstanceList(BaseModel):
    """Engines."""

    instances: list[InstanceRow]


class RestingPair(BaseModel):
    """Two engines that get no requests together, because their transfers fail."""

    prefill: str
    decode: str
    reason: str


class ExplainResponse(BaseModel):
    """What would become of a request: the rule, the engines, and what each would get."""

    rule: str
    prefill: str | None
    decode: str
    prefill_slice: str | None = Field(
        description="pdrelay/slice of the prefill engine, if it has one"
    )
    decode_slice: str | None
    slice_crossing: str | None = Field(
        description="Why they are of two slices though one is preferred (slice_pairing), by the words of "
        "pdrelay_slice_crossings_total; null: they are of one, or slices play no part"
    )
    prefill_body: JsonObject | None
    decode_body: JsonObject
    prompt_bytes: int
    cached_bytes: dict[str, int] = Field(
        description="Bytes of the prompt that each engine has, as far as is known"
    )
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
    resting_pairs: list[RestingPair] = Field(
        description=(
            "Pairs that get no requests because their transfers fail (docs/faults.md), at most 20"
        )
    )
    expected_ms: dict[str, float] | None = Field(
        description=(
            "Milliseconds that the request is expected to wait for its first token, by term "
            "(expected_ttft)"
        )
    )


# What everybody gets


class Health(BaseModel):
    """Whether the router has an engine of each role, or should be sent requests."""

    status: Literal["ok", "ready"]


class FleetHealth(Health):
    """The same, and what is wrong with the fleet as a whole."""

    warnings: list[str] | None = Field(
        default=None, description="in sentences; absent: nothing is wrong"
    )


class ErrorDetail(BaseModel):
    """What is wrong, in the shape of OpenAI's API."""

    message: str
    type: str
    param: str | None = Field(description="The field of the body that is wrong")
    code: int = Field(description="The status")


class ErrorResponse(BaseModel):
    """An error of a route for clients."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """What is wrong, in the shape of Anthropic's API."""

    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """An error of the Messages API."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class ServedModel(BaseModel):
    """A model, as the engine that serves it describes it."""

    model_config = ConfigDict(extra="allow")

    id: str


class ServedModels(BaseModel):
    """The models of all engines that answer."""

    object: Literal["list"]
    data: list[ServedModel]


# What clients send: the fields that the router reads, and any other


class ForwardedHeaders(BaseModel):
    """The headers that mean something to the router."""

    x_request_id: str | Absent = Field(
        None, description="the client's name of the request; answer and log repeat it"
    )
    x_session_id: str | Absent = Field(
        None,
        description=(
            "requests with the same one go to the same engine (session); docs/routing.md lists "
            "other names"
        ),
    )
    x_data_parallel_rank: int | Absent = Field(
        None, ge=0, description="the rank of the engine that decodes"
    )
    x_vllm_priority: int | Absent = Field(
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


def _described(name: str) -> ConfigDict:
    return ConfigDict(
        extra="allow", json_schema_extra=lambda schema: describe_request(schema, name)
    )


class TokensRequest(GenerateRequest):
    """Token ids to go on with: the answer has token ids, too."""

    model_config = _described("TokensRequest")

    token_ids: list[int]
    sampling_params: JsonObject
    stream_options: JsonObject | None = None


class ResponsesRequest(GenerateRequest):
    """A request in the Responses API."""

    model_config = _described("ResponsesRequest")

    input: str | list[Any]
    max_output_tokens: int | None = None
    tools: list[JsonObject] | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: Literal[False] | None = Field(
        None, description="such answers cannot be fetched through the router"
    )


class MessagesRequest(GenerateRequest):
    """A request in the Messages API."""

    model_config = _described("MessagesRequest")

    messages: list[JsonObject]
    max_tokens: int
    thinking: JsonObject | None = None
