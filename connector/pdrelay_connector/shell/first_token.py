"""Tells routers whether another engine may continue this engine's streams.

A router that shows this engine's first token appends it to the prompt of the decode leg. That is
right only if the token and the limits are those of a single engine, which only this engine knows.
The same holds for streams that are resumed or moved: all generated tokens are appended.
"""

from collections.abc import Mapping
from typing import Any, Final

from vllm.config import ModelConfig, VllmConfig

# of the kv_transfer_params; routers read it, decode engines do not
PARAM: Final = "pdrelay_first_token"
LOOKS_BACK: Final = "pdrelay_looks_back"  # as PARAM
_COMPLETIONS: Final = "completions"
_CHAT: Final = "chat"
# vLLM parses its answers without being told to (entrypoints/openai/chat_completion)
_HARMONY: Final = "gpt_oss"
# Defaults of an engine that look back at the tokens made so far: behind the token they would begin
# anew.
_LOOK_BACK: Final = frozenset({"max_tokens", "presence_penalty", "frequency_penalty"})


def first_token(config: VllmConfig, left_out: int) -> Mapping[str, Any]:
    """Return the params that name the APIs for which the token may be shown; empty: none.

    An engine that leaves out the last tokens of a prompt makes its token of a shorter one. A
    reasoning parser may call the token of a chat something else in a stream than in a whole answer.
    """
    model = config.model_config
    if _looks_back(model) or left_out:
        return {}
    parses = (
        config.structured_outputs_config.reasoning_parser or model.hf_config.model_type == _HARMONY
    )
    apis = [_COMPLETIONS] if parses else [_COMPLETIONS, _CHAT]
    return {PARAM: {"apis": apis, "max_model_len": model.max_model_len}}


def looks_back(config: VllmConfig) -> Mapping[str, Any]:
    """Return the params that forbid other engines to continue a stream; empty: they may.

    They are set if default sampling penalties or logits processors depend on the generated tokens,
    because these would begin anew.
    """
    return {LOOKS_BACK: True} if _looks_back(config.model_config) else {}


def _looks_back(model: ModelConfig) -> bool:
    """R-SWA (``rswa_window``) attends to a prompt in another way than to what was made since."""
    if getattr(model, "rswa_window", None) is not None:
        return True
    return bool(model.logits_processors or _LOOK_BACK & model.get_diff_sampling_param().keys())
