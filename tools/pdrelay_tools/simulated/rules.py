"""What a simulated engine computes, and the rules that it enforces: pure functions of requests.

A prefill engine signs its kv_transfer_params, byte for byte, with the request and its id. So a
decode engine, which shares the secret, knows whether a router changed them, or sent them with
another request.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, cast

import msgspec

Json: TypeAlias = dict[str, Any]

SECRET: Final = b"simulated engines of one test share this"
_UNSIGNED: Final = "0" * 64
_SIGNATURE: Final = re.compile(r'"signature": "([0-9a-f]{64})"')
_TOKENS: Final = re.compile(r',"prompt_token_ids":\[[0-9, ]*\]}$')
_PROMPT: Final = 10_000  # the id before those of a prompt; below are its bytes
_WORD: Final = 20_000  # and the words from here on
_SYLLABLES: Final = (
    "am",
    "be",
    "cor",
    "da",
    "el",
    "fi",
    "gro",
    "hu",
    "in",
    "jo",
    "ka",
    "lu",
    "mo",
    "ni",
    "or",
    "pri",
)
# A router may change these on the prefill leg; all other fields of the two legs must be equal.
# The model may be in one leg only: a router can learn it from the prefill engine's answer.
_OF_ONE_LEG: Final = frozenset(
    {
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "min_tokens",
        "stream",
        "stream_options",
        "n",
        "best_of",
        "store",
        "return_token_ids",
        "model",
        "use_beam_search",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "kv_transfer_params",
    }
)
_PUSH_PARAMS: Final = {
    **dict.fromkeys(("remote_engine_id", "remote_host", "remote_request_id", "transfer_id"), str),
    **dict.fromkeys(("remote_port", "tp_size", "pp_size", "dcp_size"), int),
}


class Violation(Exception):
    """A router broke a rule of the two legs."""


def expected_text(body: Json) -> str:
    """Return the text that every simulated engine generates for a request's first prompt."""
    return "".join(tokens(prompts_of(body)[0], token_limit(body)))


def tokens(prompt: object, count: int) -> list[str]:
    """Return so many words; each depends on the whole prompt and on its place."""
    return [
        f" {_SYLLABLES[token // 16]}{_SYLLABLES[token % 16]}" for token in token_ids(prompt, count)
    ]


def token_ids(prompt: object, count: int) -> list[int]:
    """Return the ids of these words."""
    seed = _canonical(prompt)
    digests = (hashlib.sha256(b"%d %s" % (place, seed)).digest() for place in range(count))
    return [digest[0] % 16 * 16 + digest[1] % 16 for digest in digests]


def prompt_ids(prompt: object) -> list[int]:
    """Return a prompt as token ids, which `continued` can decode."""
    return [_PROMPT, *_canonical(prompt)]


def continued(body: Json) -> tuple[Json, int]:
    """Return a request as its client sent it, and how many generated words its prompt ends with.

    A router that resumes a stream appends the tokens so far to the prompt.
    """
    params: Json = body.get("kv_transfer_params") or {}
    ids: object = params.get("prompt_token_ids") or body.get("prompt")
    if not isinstance(ids, list) or not ids or cast("list[object]", ids)[0] != _PROMPT:
        return body, 0
    own_ids = cast("list[int]", ids)[1:]
    text = bytes(token for token in own_ids if token < _WORD)
    return (body | {"prompt": json.loads(text)} if "prompt" in body else body), len(own_ids) - len(
        text
    )


def prompts_of(body: Json) -> list[object]:
    """Return the prompts of a request: its messages, a text, one list of token ids, or several of
    these.
    """
    for name in ("messages", "input", "token_ids"):
        if name in body:
            return [body[name]]
    prompt = body["prompt"]
    if not isinstance(prompt, list):
        return [prompt]
    several = cast("list[object]", prompt)
    return [several] if several and isinstance(several[0], int) else several


def of_another_prompt(body: Json) -> Json:
    """Return a request with another prompt of the same length."""
    prompt: object = body.get("prompt")
    if isinstance(prompt, str):
        return body | {"prompt": f"{prompt[:-1]}~"}
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], int):
        return body | {"prompt": [*cast("list[int]", prompt)[:-1], prompt[-1] ^ 1]}
    if "messages" in body:
        return body | {
            "messages": [*body["messages"][:-1], {**body["messages"][-1], "role": "nobo"}]
        }
    return body


def token_limit(body: Json) -> int:
    """Return how many tokens a request asks for; 16 when it does not say."""
    sampling = body.get("sampling_params", body)
    limits = [
        sampling.get(name) for name in ("max_completion_tokens", "max_output_tokens", "max_tokens")
    ]
    return next((int(limit) for limit in limits if limit is not None), 16)


def answer_tokens(body: Json) -> int:
    """Return how many tokens all answers to a request have; raises ValueError: ``n`` is invalid."""
    answers = body.get("n") or 1
    if not isinstance(answers, int) or answers < 1:
        raise ValueError("n is no number of answers")
    return len(prompts_of(body)) * answers * token_limit(body)


def prompt_tokens(body: Json) -> int:
    """Return the length of all prompts, in simulated tokens."""
    return sum(len(_canonical(prompt)) // 4 + 1 for prompt in prompts_of(body))


def word_id(prompt: object, place: int) -> int:
    """Return a word as a token."""
    return _WORD + token_ids(prompt, place + 1)[place]


def ids_of(body: Json, generated: int) -> list[int]:
    """Return the token ids of a request's first prompt, and of the generated words behind it."""
    prompt = prompts_of(body)[0]
    prompt_list = cast("list[object]", prompt) if isinstance(prompt, list) else []
    if prompt_list and all(isinstance(token, int) for token in prompt_list):
        return cast("list[int]", prompt_list)
    text: object = prompts_of(body)[0]
    return [*prompt_ids(text), *(word_id(text, place) for place in range(generated))]


def generated_ids(body: Json, generated: int) -> list[int]:
    """Return the ids of the next tokens that an engine generates for the first prompt."""
    prompt = prompts_of(body)[0]
    return [word_id(prompt, generated + place) for place in range(token_limit(body))]


def check_prefill_leg(
    body: Json, *, pushes: bool = False, limits: Sequence[str] = ("max_tokens",)
) -> None:
    """Raise Violation unless a body asks for the KV of its prompt and one token.

    ``limits``: the fields that must say so.
    """
    params: Json = body.get("kv_transfer_params") or {}
    if params.get("do_remote_decode") is not True or params.get("do_remote_prefill") is not False:
        raise Violation("a prefill leg must ask for do_remote_decode")
    sampling = body.get("sampling_params", body)
    # its token is the client's
    may_end = sampling.get("return_token_ids") and sampling.get("min_tokens") == 0
    if {sampling.get(name) for name in limits} - ({0} if may_end else set()) != {1} or token_limit(
        body
    ) != 1:
        raise Violation("a prefill leg must ask for exactly one token")
    if body.get("stream") is not False or body.get("stream_options") is not None:
        raise Violation("a prefill leg must not be streamed")
    if len(prompts_of(body)) != 1 or body.get("n", 1) not in (1, None):
        raise Violation("a prefill leg must have one prompt and one sequence")
    if pushes and not params.get("transfer_id"):
        raise Violation("a prefill leg must name its transfer")


def abandoned(body: Json) -> str | None:
    """Return the id of the transfer that a request abandons; None: it abandons none."""
    params: Json = body.get("kv_transfer_params") or {}
    return params.get("abandoned_transfer_id")


def make_params(
    body: Json,
    request_id: str,
    *,
    name: str,
    mode: str = "pull",
    offers: bool = False,
    forget: Sequence[str] = (),
) -> msgspec.Raw:
    """Return the signed kv_transfer_params of a prefilled request; ``offers``: its token, too."""
    blocks = list(range(1, prompt_tokens(body) // 16 + 2))
    params: Json = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [blocks],
        "remote_engine_id": name,
        "remote_request_id": f"{shared_id(body, request_id)}-{_digest(request_id)[:8]}",
        "remote_host": "192.0.2.1",  # reserved for documentation (RFC 5737): no host has it
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": prompt_tokens(body),
        "remote_blocks_expiry_time": None,
        "transfer_mode": mode,
        "remote_prefill_cached_tokens": 0,
        "of_a_later_version": {
            "escaped": "\u00e9",
            "request": identity(body),
            "signature": _UNSIGNED,
        },
    }
    if offers:
        params["pdrelay_first_token"] = {"apis": ["completions", "chat"], "max_model_len": _WORD}
    text = json.dumps({key: value for key, value in params.items() if key not in forget})
    return msgspec.Raw(text.replace(_UNSIGNED, _sign(text)).encode())


def check_decode_leg(raw: msgspec.Raw, body: Json, request_id: str) -> None:
    """Raise Violation unless the parameters are unchanged and belong to this request."""
    # a router may add token ids, from the answer of the prefill engine
    text = _TOKENS.sub("}", bytes(raw).decode())
    match = _SIGNATURE.search(text)
    if match is None or not hmac.compare_digest(match[1], _sign(text.replace(match[1], _UNSIGNED))):
        raise Violation("the kv_transfer_params were changed on their way")
    params = body["kv_transfer_params"]
    if params["of_a_later_version"]["request"] != identity(body):
        raise Violation("the kv_transfer_params belong to another request")
    if request_id not in params["remote_request_id"]:
        raise Violation("the two legs have different X-Request-Ids")


def check_push_leg(body: Json, request_id: str) -> None:
    """Raise Violation unless the parameters say completely which prefill engine pushes.

    vLLM reads them by name, and dies if some of them are missing or of a wrong type.
    """
    params: Json = body["kv_transfer_params"]
    if params.get("do_remote_prefill") is not True or params.get("do_remote_decode") is not False:
        raise Violation("a decode leg must ask for do_remote_prefill")
    for name, kind in _PUSH_PARAMS.items():
        if type(params.get(name)) is not kind or not params[name]:
            raise Violation(f"{name} is missing in the kv_transfer_params, or odd")
    if not params["remote_request_id"].startswith(shared_id(body, request_id)):
        raise Violation("the prefill engine does not know this request by the remote_request_id")


def shared_id(body: Json, request_id: str) -> str:
    """Return the id that both engines derive for a request."""
    if "token_ids" in body:
        return f"generate-tokens-{request_id}"
    if "input" in body:
        return f"{body['request_id']}_0"
    return f"chatcmpl-{request_id}" if "messages" in body else f"cmpl-{request_id}-0"


def identity(body: Json) -> str:
    """Return a digest of the fields that both legs of a request share."""
    return _digest(_canonical(_of_both_legs(body)))


def _of_both_legs(body: Json) -> Json:
    shared = {key: value for key, value in body.items() if key not in _OF_ONE_LEG}
    return shared | {
        key: _of_both_legs(shared[key]) for key in ("sampling_params",) if key in shared
    }


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(value: str | bytes) -> str:
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()


def _sign(text: str) -> str:
    return hmac.digest(SECRET, text.encode(), "sha256").hex()
