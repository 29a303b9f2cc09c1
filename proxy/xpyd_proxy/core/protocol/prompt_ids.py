"""The token ids of a text or a chat, out of a prefill engine's answer (``return_token_ids``, vLLM 0.10.2 and later).

/v1/responses and /v1/messages of vLLM 0.32 have no such field, and prompts of ids need none.
"""

from typing import Final

from xpyd_proxy.core.model import Api, GenerationRequest, RoutingHints
from xpyd_proxy.core.raw_json import NULL, TRUE, Fields, maybe
from xpyd_proxy.core.schemas import PromptIdsAnswer
from xpyd_proxy.core.token_blocks import TokenPrompt, is_plain, prompt_of

IDS_MOST: Final = 1 << 20  # bytes of their JSON: 150,000 ids, which are read in 4 ms
_FOR: Final = (Api.CHAT, Api.COMPLETIONS)
_UNEVEN: Final = ("tools", "documents")  # some templates write them before the last message
_BRACKET: Final = 91


def may_tell_ids(call: GenerationRequest, ask: RoutingHints) -> bool:
    """Tell whether a prefill engine can tell all that decides which cache blocks a request's prompt has."""
    if call.api not in _FOR or not is_plain(call.fields) or ask.token_prompt is not None:
        return False
    blocks = ask.blocks
    return blocks.is_compared and not blocks.has_media


def asking_for_ids(fields: Fields) -> Fields:
    """Return the fields of a prefill leg whose answer has the ids of its prompt."""
    return fields | {"return_token_ids": TRUE}


def is_even(ask: RoutingHints) -> bool:
    """Tell whether the tokens of a prompt come in the order of its text, as far as its fields show."""
    return ask.prompt[:1] != b"[" or all(ask.context.get(name, NULL) == NULL for name in _UNEVEN)


def told_ids(answer: bytes, ask: RoutingHints) -> TokenPrompt | str:
    """Return the prompt that an engine has computed, or the word by which it is counted that there is none."""
    said = maybe(answer, PromptIdsAnswer)
    ids = NULL if said is None else said.prompt_token_ids
    if said is not None and ids == NULL and len(said.choices) == 1:
        ids = said.choices[0].prompt_token_ids
    view = memoryview(ids)
    if len(view) > IDS_MOST:
        return "too_long"
    if view[0] != _BRACKET:
        return "not_told"
    found = maybe(ids, list[int])
    prompt = None if not found else prompt_of(found, ask.context)
    return "not_told" if prompt is None else prompt
