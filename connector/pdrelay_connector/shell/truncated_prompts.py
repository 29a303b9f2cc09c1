"""Prompts that a prefill engine computes without their last tokens, for states and drafts.

A decode engine computes the last prompt token itself, for its logits. A state that already includes
that token would include it twice. So vLLM's NixlConnector removes it from the request before it is
scheduled (``_truncate_request_for_prefill`` in ``kv_connector/v1/nixl/base_scheduler.py``, 0.32),
and so do we.
"""

from vllm.v1.request import Request

from pdrelay_connector.core.layout.cache_groups import moved_tokens


def can_move(request: Request, left_out: int) -> bool:
    """Return whether this engine can compute the KV of a new request for another one.

    A request for the logprobs of its prompt needs all of it, and its decode engine loads nothing:
    it computes the prompt itself (``skip_reading_prefix_cache`` in ``v1/core/sched/scheduler.py``).
    """
    return not left_out or not request.get_skip_reading_prefix_cache()


def truncate(request: Request, left_out: int) -> None:
    """Remove the last prompt tokens of a new request, as many as are left out. Call this once."""
    tokens = moved_tokens(request.num_prompt_tokens, left_out)
    if tokens == request.num_prompt_tokens:
        return
    if request.prompt_token_ids is not None:
        request.prompt_token_ids = request.prompt_token_ids[:tokens]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:tokens]
    if request.prompt_is_token_ids is not None:
        request.prompt_is_token_ids = request.prompt_is_token_ids[:tokens]
    del request._all_token_ids[tokens:]  # noqa: SLF001 -- vLLM's connector does the same; all_token_ids is a view of it
    request.num_prompt_tokens = tokens
    # the token after a truncated prompt is no answer, and a second one would change the state
    request.max_tokens = 1
