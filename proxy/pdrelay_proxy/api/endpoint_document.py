"""The document's text for each endpoint: its operation id, one sentence, its request and its
answer.

The shapes are vLLM's, as far as clients use them; every request and answer may have more fields.
They check nothing: the engines do that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Part: TypeAlias = dict[str, Any]  # of an OpenAPI document

_TEXT: Final[Part] = {"type": "string"}
_WHOLE: Final[Part] = {"type": "integer"}
_NUMBER: Final[Part] = {"type": "number"}
_OBJECT: Final[Part] = {"type": "object", "additionalProperties": True}
_ANY: Final[Part] = {}


def _list(items: Part) -> Part:
    return {"type": "array", "items": items}


def _or_null(part: Part) -> Part:
    return {"anyOf": [part, {"type": "null"}]}


def _shape(about: str, needed: Mapping[str, Part], other: Mapping[str, Part] | None = None) -> Part:
    fields = {**needed, **(other or {})}
    return {
        "type": "object",
        "description": about,
        "properties": fields,
        "required": list(needed),
        "additionalProperties": True,
    }


_INPUT: Final[Part] = {"anyOf": [_TEXT, _list(_TEXT), _list(_WHOLE), _list(_list(_WHOLE))]}
_TEXTS: Final[Part] = {"anyOf": [_TEXT, _list(_TEXT)]}
_USAGE: Final[Part] = _or_null(
    _shape(
        "Tokens", {"prompt_tokens": _WHOLE, "total_tokens": _WHOLE}, {"completion_tokens": _WHOLE}
    )
)
_MODEL: Final[Mapping[str, Part]] = {"model": _or_null(_TEXT)}
_COMMON: Final[Mapping[str, Part]] = {**_MODEL, "priority": _WHOLE, "user": _TEXT}
_MADE: Final[Mapping[str, Part]] = {"id": _TEXT, "object": _TEXT, "created": _WHOLE, "model": _TEXT}

# Answers, and the requests of endpoints with one leg, by the names of their schemas;
# text_schemas.py has the others.
SHAPES: Final[Mapping[str, Part]] = {
    "ResponseObject": _shape(
        "An answer of the Responses API",
        {
            "id": _TEXT,
            "object": _TEXT,
            "created_at": _NUMBER,
            "model": _TEXT,
            "status": _TEXT,
            "output": _list(_OBJECT),
        },
        {"usage": _or_null(_OBJECT), "error": _ANY},
    ),
    "Message": _shape(
        "An answer of the Messages API",
        {"id": _TEXT, "type": _TEXT, "role": _TEXT, "model": _TEXT, "content": _list(_OBJECT)},
        {
            "stop_reason": _or_null(_TEXT),
            "usage": _shape("Tokens", {"input_tokens": _WHOLE, "output_tokens": _WHOLE}),
        },
    ),
    "GeneratedTokens": _shape(
        "Token ids that go on with those of the request",
        {
            "request_id": _TEXT,
            "choices": _list(_shape("One of n", {"index": _WHOLE, "token_ids": _list(_WHOLE)})),
        },
    ),
    "EmbeddingRequest": _shape(
        "Texts to embed", {"input": _INPUT}, {**_COMMON, "dimensions": _WHOLE}
    ),
    "EmbeddingList": _shape(
        "An embedding of each text",
        {
            **_MADE,
            "data": _list(_shape("One", {"index": _WHOLE, "object": _TEXT, "embedding": _ANY})),
            "usage": _USAGE,
        },
    ),
    "CohereEmbedRequest": _shape(
        "Texts to embed, in Cohere's API",
        {},
        {**_COMMON, "texts": _list(_TEXT), "input_type": _TEXT, "embedding_types": _list(_TEXT)},
    ),
    "PoolingRequest": _shape("Texts to pool", {"input": _INPUT}, _COMMON),
    "PooledList": _shape(
        "What each text was pooled to", {**_MADE, "data": _list(_OBJECT), "usage": _USAGE}
    ),
    "ClassificationRequest": _shape("Texts to classify", {"input": _INPUT}, _COMMON),
    "ScoreRequest": _shape(
        "Two texts, or a text and several", {"text_1": _TEXTS, "text_2": _TEXTS}, _COMMON
    ),
    "ScoreList": _shape(
        "A score for each pair",
        {
            **_MADE,
            "data": _list(_shape("One", {"index": _WHOLE, "score": _NUMBER})),
            "usage": _USAGE,
        },
    ),
    "RerankRequest": _shape(
        "A query, and documents to sort by it",
        {"query": _TEXT, "documents": _list(_ANY)},
        {**_COMMON, "top_n": _WHOLE},
    ),
    "RankedList": _shape(
        "Documents, the most relevant first",
        {
            "id": _TEXT,
            "model": _TEXT,
            "results": _list(_shape("One", {"index": _WHOLE, "relevance_score": _NUMBER})),
        },
    ),
    "GenerativeScoringRequest": _shape(
        "A query, and items to score by the probability of labels",
        {"query": _INPUT, "items": _INPUT, "label_token_ids": _list(_WHOLE)},
        _COMMON,
    ),
    "DecisionRequest": _shape(
        "Questions about a text or an object",
        {"state": _ANY, "questions": _OBJECT},
        {**_MODEL, "instructions": _TEXT},
    ),
    "EngineRequest": _shape("All of it goes to the engine as it came", {}, _COMMON),
    "BatchChatRequest": _shape(
        "Several chats", {"messages": _list(_list(_OBJECT))}, {**_COMMON, "max_tokens": _WHOLE}
    ),
    "TokenizeRequest": _shape(
        "A text, or the messages of a chat",
        {},
        {**_MODEL, "prompt": _TEXT, "messages": _list(_OBJECT)},
    ),
    "Tokens": _shape(
        "Token ids", {"tokens": _list(_WHOLE), "count": _WHOLE, "max_model_len": _WHOLE}
    ),
    "DetokenizeRequest": _shape("Token ids", {"tokens": _list(_WHOLE)}, _MODEL),
    "Prompt": _shape("The text of token ids", {"prompt": _TEXT}),
    "CountTokensRequest": _shape(
        "A request of the Messages API, without its limit",
        {"model": _TEXT, "messages": _list(_OBJECT)},
        {"system": _ANY, "tools": _list(_OBJECT)},
    ),
    "TokenCount": _shape("How many tokens the prompt has", {"input_tokens": _WHOLE}),
    "DerenderChatRequest": _shape(
        "An answer in token ids, to be written as one of a chat",
        {"generate_response": _OBJECT},
        {**_MODEL, "chat_request": _OBJECT},
    ),
    "DerenderCompletionRequest": _shape(
        "Answers in token ids, to be written as a completion",
        {"generate_responses": _list(_OBJECT)},
        {**_MODEL, "completion_request": _OBJECT},
    ),
    "Transcription": _shape("The text of the audio", {"text": _TEXT}),
    "EngineAnswer": _shape("The engine's answer, as it is", {}),
}

_CHAT: Final = [{"role": "user", "content": "Say hello."}]
_MODEL_NAME: Final = "MODEL"  # docs.html writes the name of a served model in its place


@dataclass(frozen=True, slots=True)
class EndpointText:
    """The document's text for one endpoint."""

    operation: str
    summary: str
    answer: str  # the name of its schema
    request: str = ""  # the same; empty: its signature has it
    # a request that works; greedy, so that a small model answers sensibly
    example: Part | None = None
    event: str = ""  # the name of the schema of a stream's events; empty: it has none


ENDPOINT_TEXTS: Final[Mapping[str, EndpointText]] = {
    "/v1/completions": EndpointText(
        "create_completion",
        "Complete a text",
        "CompletionResponse",
        "CompletionRequest",
        {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0},
        event="CompletionStreamResponse",
    ),
    "/v1/chat/completions": EndpointText(
        "create_chat_completion",
        "Answer in a chat",
        "ChatCompletionResponse",
        "ChatCompletionRequest",
        {"messages": _CHAT, "max_tokens": 16, "temperature": 0},
        event="ChatCompletionStreamResponse",
    ),
    "/v1/responses": EndpointText(
        "create_response", "Answer, in the Responses API", "ResponseObject"
    ),
    "/v1/messages": EndpointText("create_message", "Answer, in the Messages API", "Message"),
    "/inference/v1/generate": EndpointText(
        "generate_tokens", "Go on with token ids, in vLLM's own API", "GeneratedTokens"
    ),
    "/v1/embeddings": EndpointText(
        "create_embedding", "Embed texts", "EmbeddingList", "EmbeddingRequest", {"input": "hello"}
    ),
    "/v2/embed": EndpointText(
        "create_cohere_embedding",
        "Embed texts, in Cohere's API",
        "EngineAnswer",
        "CohereEmbedRequest",
        {"texts": ["hello"], "input_type": "search_document", "embedding_types": ["float"]},
    ),
    "/pooling": EndpointText(
        "create_pooling", "Pool texts", "PooledList", "PoolingRequest", {"input": "hello"}
    ),
    "/classify": EndpointText(
        "create_classification",
        "Classify texts",
        "PooledList",
        "ClassificationRequest",
        {"input": "hello"},
    ),
    **{
        path: EndpointText(
            operation,
            "Score pairs of texts",
            "ScoreList",
            "ScoreRequest",
            {"text_1": "hello", "text_2": ["hi", "bye"]},
        )
        for path, operation in (("/score", "create_score"), ("/v1/score", "create_score_v1"))
    },
    **{
        path: EndpointText(
            operation,
            "Sort documents by a query",
            "RankedList",
            "RerankRequest",
            {"query": "hello", "documents": ["hi", "bye"]},
        )
        for path, operation in (
            ("/rerank", "rerank"),
            ("/v1/rerank", "rerank_v1"),
            ("/v2/rerank", "rerank_v2"),
        )
    },
    "/generative_scoring": EndpointText(
        "create_generative_score",
        "Score items by the probability of labels",
        "EngineAnswer",
        "GenerativeScoringRequest",
        {"query": "hello", "items": ["hi", "bye"], "label_token_ids": [1, 2]},
    ),
    "/v1/systemone": EndpointText(
        "answer_questions",
        "Answer questions about a state",
        "EngineAnswer",
        "DecisionRequest",
        {"state": "It rains.", "questions": {"wet": {"type": "boolean", "question": "Is it wet?"}}},
    ),
    "/v1/decisions": EndpointText(
        "create_decision", "Decide, with vLLM 0.33", "EngineAnswer", "EngineRequest", {}
    ),
    "/v1/chat/completions/batch": EndpointText(
        "create_chat_completion_batch",
        "Answer in several chats",
        "ChatCompletionResponse",
        "BatchChatRequest",
        {"messages": [_CHAT, _CHAT], "max_tokens": 16, "temperature": 0},
    ),
    "/tokenize": EndpointText(
        "tokenize",
        "Turn a text or a chat into token ids",
        "Tokens",
        "TokenizeRequest",
        {"prompt": "hello"},
    ),
    "/detokenize": EndpointText(
        "detokenize",
        "Turn token ids into a text",
        "Prompt",
        "DetokenizeRequest",
        {"tokens": [1, 2, 3]},
    ),
    "/v1/messages/count_tokens": EndpointText(
        "count_message_tokens",
        "Count the tokens of a request of the Messages API",
        "TokenCount",
        "CountTokensRequest",
        {"model": _MODEL_NAME, "messages": _CHAT},
    ),
    "/v1/completions/render": EndpointText(
        "render_completion", "Turn a completion into token ids", "EngineAnswer", "CompletionRequest"
    ),
    "/v1/chat/completions/render": EndpointText(
        "render_chat_completion",
        "Turn a chat into token ids",
        "EngineAnswer",
        "ChatCompletionRequest",
    ),
    "/v1/responses/render": EndpointText(
        "render_response",
        "Turn a request of the Responses API into token ids",
        "EngineAnswer",
        "ResponsesRequest",
    ),
    "/v1/messages/render": EndpointText(
        "render_message",
        "Turn a request of the Messages API into token ids",
        "EngineAnswer",
        "MessagesRequest",
    ),
    "/v1/completions/derender": EndpointText(
        "derender_completion",
        "Write token ids as a completion",
        "CompletionResponse",
        "DerenderCompletionRequest",
    ),
    "/v1/chat/completions/derender": EndpointText(
        "derender_chat_completion",
        "Write token ids as an answer in a chat",
        "ChatCompletionResponse",
        "DerenderChatRequest",
    ),
    "/v1/audio/transcriptions": EndpointText(
        "create_transcription", "Write down what is said", "Transcription"
    ),
    "/v1/audio/translations": EndpointText(
        "create_translation", "Write down in English what is said", "Transcription"
    ),
}

# Fields of vLLM 0.32's requests that the router does not read, by their types.
_SAMPLING: Final[Mapping[str, str]] = {
    "number": "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty",
    "integer": "seed top_k",
    "string": "user cache_salt session_id",
}
_KINDS: Final[Mapping[str, Part]] = {"any": _ANY, "array": _list(_ANY)}
VLLM_FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "ResponsesRequest": {
        **_SAMPLING,
        "string": f"{_SAMPLING['string']} instructions service_tier prompt_cache_key mm_payload",
        "integer": f"{_SAMPLING['integer']} max_tool_calls top_logprobs",
        "boolean": "parallel_tool_calls include_reasoning skip_special_tokens include_stop_str_in_output ignore_eos "
        "watermarking return_mm_kwargs enable_response_messages",
        "object": "metadata logit_bias reasoning text prompt structured_outputs mm_processor_kwargs media_io_kwargs "
        "chat_template_kwargs",
        "array": "include stop_token_ids previous_input_messages",
        "any": "tool_choice stop",
    },
    "MessagesRequest": {
        "number": "temperature top_p",
        "integer": "top_k",
        "string": "cache_salt mm_payload",
        "boolean": "watermarking return_mm_kwargs",
        "object": "metadata output_config tool_choice chat_template_kwargs",
        "array": "stop_sequences tools",
        "any": "system",
    },
    "TokensRequest": {
        "string": "cache_salt output_mode",
        "boolean": "reasoning_ended return_token_ids",
        "object": "features reasoning_parser_kwargs",
        "array": "content_parts token_offsets",
    },
}
EXAMPLES: Final[Mapping[str, Part]] = {
    "ResponsesRequest": {"input": "Say hello.", "max_output_tokens": 16, "temperature": 0},
    "MessagesRequest": {
        "model": _MODEL_NAME,
        "messages": _CHAT,
        "max_tokens": 16,
        "temperature": 0,
    },
    "TokensRequest": {
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 16, "temperature": 0},
    },
}


def describe_request(schema: Part, name: str) -> None:
    """Add vLLM's fields to a request's schema, and an example that works."""
    for kind, names in VLLM_FIELDS[name].items():
        for field in names.split():
            schema["properties"].setdefault(field, _KINDS.get(kind, {"type": kind}))
    schema["examples"] = [EXAMPLES[name]]
