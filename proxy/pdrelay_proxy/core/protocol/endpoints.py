"""The paths that clients can reach, and how many engines serve each.

All other paths are unknown to clients: they cannot reach an engine's own paths (sleep, LoRA,
profiling, weights, the dispatcher /invocations) through the router, whatever a later vLLM adds.
"""

from collections.abc import Mapping
from enum import StrEnum, auto
from typing import Final

from pdrelay_proxy.core.model import Api


class EndpointKind(StrEnum):
    """How a path is served."""

    SPLIT = auto()  # one engine prefills, another one decodes
    JSON = auto()  # one decode engine serves it; the body is a JSON object
    FORM = auto()  # the same, and the body is a form with a file in it


_JSON: Final = (
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/generative_scoring",
    "/v1/systemone",
    "/v1/decisions",
    "/v1/chat/completions/batch",
)
# No prompt is computed: these turn requests into tokens and back (vllm/entrypoints/scale_out/render
# and derender).
_NO_PROMPT: Final = (
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
    "/v1/completions/derender",
    "/v1/chat/completions/derender",
)
_FORM: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")

UNCACHED: Final = frozenset(_NO_PROMPT)

ENDPOINTS: Final[Mapping[str, EndpointKind]] = {
    **{api.value: EndpointKind.SPLIT for api in Api},
    **dict.fromkeys((*_JSON, *_NO_PROMPT), EndpointKind.JSON),
    **dict.fromkeys(_FORM, EndpointKind.FORM),
}
