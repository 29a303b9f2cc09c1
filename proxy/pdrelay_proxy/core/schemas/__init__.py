"""What engines say and are told in JSON: types, and nothing that is done with them.

They stand apart from the modules that read them because those are compiled (see
docs/performance.md), and msgspec makes its own classes: a compiled module would make something else
of them.
"""

from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import msgspec

from pdrelay_proxy.core.raw_json import NULL, Fields

# What an engine says of itself is kept, logged and shown: as long as a path may be, and no longer.
EngineFact: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
_Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**16)]
_Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65535)]
# Tokens that an engine has counted for a request. Prices, quotas and bills add them up, so a usage
# with a number beyond any request's says nothing.
_TokenCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class PrefillAnswer(msgspec.Struct):
    """What we read of a prefill engine's answer."""

    kv_transfer_params: msgspec.Raw = NULL
    usage: msgspec.Raw = NULL


class PlainPrefillAnswer(msgspec.Struct):
    """The same of one whose usage is as engines write it: read in one go."""

    kv_transfer_params: msgspec.Raw = NULL
    usage: "Usage | None" = None


class NamedAnswer(msgspec.Struct):
    """An answer that says which model has made it."""

    model: str | None = None


class PromptIdsChoice(msgspec.Struct):
    """The choice of a completion that tells the ids of its prompt."""

    prompt_token_ids: msgspec.Raw = NULL


class PromptIdsAnswer(msgspec.Struct):
    """The same of one that tells the ids of its prompt."""

    kv_transfer_params: msgspec.Raw = NULL
    usage: "PromptUsage | None" = None
    prompt_token_ids: msgspec.Raw = NULL  # of a chat
    choices: tuple[PromptIdsChoice, ...] = ()  # of a completion


class TransferNaming(msgspec.Struct):
    """How a prefill engine knows a request, and whether it pushes."""

    remote_request_id: _Text
    transfer_mode: str | None = None


class KvParams(TransferNaming, kw_only=True):
    """The parameters without which a decode engine dies, as vLLM 0.32 answers them."""

    do_remote_prefill: bool
    remote_engine_id: _Text
    remote_host: _Text
    remote_port: int
    remote_block_ids: msgspec.Raw
    pdrelay_first_token: msgspec.Raw = NULL  # what it offers of its token, for routers alone
    # true: no other engine goes on exactly with its streams; for routers alone
    pdrelay_looks_back: msgspec.Raw = NULL


class LeaseOffer(msgspec.Struct):
    """How long our connector keeps a prompt's blocks until it hears of a decode engine, in s."""

    pdrelay_lease: Annotated[float, msgspec.Meta(gt=0)] | None = None


class TokensChoice(msgspec.Struct):
    """The choice of an answer that has one token."""

    text: str | None = None
    message: dict[str, msgspec.Raw] | None = None
    finish_reason: str | None = None
    stop_reason: msgspec.Raw = NULL
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: msgspec.Raw = NULL


class PlainMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a chat that is a text, and nothing else."""

    role: str | None = None
    content: str | None = None
    name: str | None = None


class TokensAnswer(msgspec.Struct):
    """A prefill engine's answer that tells token ids: read once, for all that is read of it."""

    id: msgspec.Raw = NULL
    created: msgspec.Raw = NULL
    model: msgspec.Raw = NULL
    choices: tuple[TokensChoice, ...] = ()
    usage: dict[str, msgspec.Raw] | None = None
    prompt_token_ids: msgspec.Raw = NULL  # of a chat
    system_fingerprint: msgspec.Raw = NULL
    kv_transfer_params: msgspec.Raw = NULL


class Coordinates(msgspec.Struct, frozen=True):
    """Where a decode engine finds the prefill engine; vLLM dies of missing or odd ones."""

    remote_engine_id: _Text
    remote_host: _Text
    remote_port: _Port
    tp_size: _Size
    pp_size: _Size = 1
    dcp_size: _Size = 1


class Usage(msgspec.Struct):
    """In the words of the four APIs; that of messages leaves out of its input what was cached."""

    prompt_tokens: _TokenCount | None = None
    input_tokens: _TokenCount | None = None
    cache_read_input_tokens: _TokenCount | None = None
    cache_creation_input_tokens: _TokenCount | None = None


class PromptUsage(Usage):
    """The usage of a completion or a chat, with what the engine says of its cache."""

    prompt_tokens_details: msgspec.Raw = NULL


class UsageInside(msgspec.Struct):
    """/v1/responses has its answer in the last event, /v1/messages its message in the first."""

    usage: Usage | None = None


class UsageAnswer(msgspec.Struct):
    """An answer, or one event of it, that may say how long its prompt is."""

    usage: Usage | None = None
    response: UsageInside | None = None
    message: UsageInside | None = None


class RawUsageAnswer(msgspec.Struct):
    """An answer whose usage is looked at by name."""

    usage: msgspec.Raw = NULL


class UsageEvent(msgspec.Struct):
    """An event of a stream that has a usage, and choices or none."""

    usage: Fields
    choices: list[msgspec.Raw]


class ServedUsage(Usage):
    """The same, and the tokens of the answer."""

    completion_tokens: _TokenCount | None = None
    output_tokens: _TokenCount | None = None


class ServedInside(msgspec.Struct):
    """The answer inside the last event of /v1/responses."""

    usage: ServedUsage | None = None
    status: str | None = None


class ServedAnswer(msgspec.Struct):
    """An answer, or one event of it, that may say how many tokens were served."""

    usage: ServedUsage | None = None
    response: ServedInside | None = None


class FinishedChoice(msgspec.Struct):
    """Why a choice has ended."""

    finish_reason: str | None = None


class Delta(msgspec.Struct):
    """What an event adds to a message: of a chat, or Anthropic's."""

    content: str | None = None
    stop_reason: str | None = None


class DeltaChoice(msgspec.Struct):
    """The choice of a chat to which it adds that."""

    delta: Delta | None = None


class DeltaEvent(msgspec.Struct):
    """An event of a stream that may say why it ends."""

    choices: tuple[DeltaChoice, ...] = ()
    delta: Delta | None = None
    usage: ServedUsage | None = None


class FinishedAnswer(ServedInside):
    """A whole answer that says why it has ended; Anthropic's is a message."""

    choices: tuple[FinishedChoice, ...] = ()
    object: str | None = None
    type: str | None = None
    stop_reason: str | None = None


class BilledUnits(msgspec.Struct):
    """What /v2/embed counts; of a request with an image, all of it is the image's (vLLM 0.32)."""

    input_tokens: _TokenCount | None = None
    image_tokens: _TokenCount | None = None


class BilledMeta(msgspec.Struct):
    """Where it says so."""

    billed_units: BilledUnits | None = None


class BilledAnswer(msgspec.Struct):
    """An answer of /v2/embed."""

    meta: BilledMeta | None = None


class PromptTokensDetails(msgspec.Struct):
    """How much of a prompt an engine did not compute."""

    cached_tokens: _TokenCount | None = None


class DetailedUsage(msgspec.Struct):
    """The usage of an engine with ``--enable-prompt-tokens-details``."""

    prompt_tokens: _TokenCount | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class UsageReport(msgspec.Struct):
    """An answer, or one event of it, that may say how much of its prompt was cached."""

    usage: DetailedUsage | None = None


class EngineErrorCode(msgspec.Struct):
    """The part of an error event that tells the status."""

    code: int | str | None = None


class ErrorEvent(msgspec.Struct):
    """What vLLM sends in place of a token when it fails after its head has left."""

    error: EngineErrorCode | None = None


class ErrorBody(msgspec.Struct):
    """An OpenAI-shaped error; vLLM's 401 has a bare string in it."""

    error: dict[str, msgspec.Raw] | str


class NamedMetrics(msgspec.Struct):
    """The two numbers of its load that vLLM 0.32 sends; other ones are not read."""

    # in its queue, whoever sent them
    num_requests_waiting: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    kv_cache_usage_perc: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # share in use


class OrcaReport(msgspec.Struct):
    """An ``endpoint-load-metrics`` header."""

    named_metrics: NamedMetrics


@dataclass(frozen=True, slots=True)
class Bin:
    """Some seconds in a row, added up; values have the unit they were given in."""

    count: int
    failed: int
    mean: float | None  # None: nothing was counted
    worst: float | None


# Of one engine, adapters among them: each list of engines names them.
MOST_MODELS: Final = 65_536


class ModelCard(msgspec.Struct):
    """A model in an engine's list (``/v1/models``)."""

    id: EngineFact
    parent: str | None = None  # of a LoRA adapter: the model it belongs to
    root: EngineFact | None = None  # where its files lie
