"""What decides the KV of a prompt beside the model: tokens, images, salt and LoRA adapter."""

from vllm.v1.request import Request

from pdrelay_connector.core.lease.kv_params import digest_prompt
from pdrelay_connector.shell.adapters import ADAPTERS


def digest(request: Request, prompt_tokens: int) -> str | None:
    """Return a digest of all inputs of so many tokens' KV; None: no token ids (embeddings)."""
    features = [feature.identifier for feature in request.mm_features]
    if (adapter := adapter_of(request)) is not None:
        features.append(f"lora:{adapter}")
    prompt = request.prompt_token_ids
    tokens = prompt[:prompt_tokens] if prompt is not None else None
    return digest_prompt(tokens, features, request.cache_salt)


def adapter_of(request: Request) -> str | None:
    """Return the LoRA adapter of a request, by its name and its digest."""
    return ADAPTERS.identity_of(request.lora_request) if request.lora_request is not None else None


def has_changed_adapter(request: Request) -> bool:
    """Whether this engine may have KV of two states of a request's LoRA adapter."""
    return request.lora_request is not None and ADAPTERS.has_changed(request.lora_request)
