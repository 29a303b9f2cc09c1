"""A model in a few lines: which token follows is decided by all tokens before it, and some tokens are half a character.

So a stream that another engine goes on with is right only if that engine was given exactly the tokens of the first.
"""

import itertools
import json
import operator

from pdrelay_proxy.core.model import Api

VOCABULARY = 40
HALF = 7  # every token that is a multiple of it has no text of its own: the next one shows both


def next_token(tokens, banned=()):
    """Return the token that follows; if it is banned, the next one that is not."""
    return _next(_weight(tokens), len(tokens), banned)


def _weight(tokens):
    """Return what the next token depends on; one more token adds its place, from 1, times itself."""
    return sum(map(operator.mul, tokens, itertools.count(1)))


def _next(weight, count, banned):
    token = (weight * 31 + count) % VOCABULARY
    while token in banned:
        token = (token + 1) % VOCABULARY
    return token


def stops_of(body, made):
    """Return the tokens that end an answer behind so many, and those that must not follow yet."""
    stops = body.get("stop_token_ids") or []
    return stops, stops if made < (body.get("min_tokens") or 0) else []


def first_answer(body, *, name):
    """Return what a prefill engine answers that is asked for one token."""
    prompt = ids_of(body)
    stops, banned = stops_of(body, 0)
    token = next_token(prompt, banned)
    is_end = token in stops
    ids = {"token_ids": [token] if body.get("return_token_ids") else None}
    text = f" {token}" if token % HALF and not is_end else ""
    choice = {"index": 0, "logprobs": None, "finish_reason": "stop" if is_end else "length"} | ids
    choice |= {"stop_reason": token if is_end else None}
    told = _ids(body, prompt)
    if "messages" in body:
        choice |= {"message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}}
    else:
        choice = choice | {"text": text} | told
        told = {}
    answer = {"id": name, "object": "whole", "created": 6, "model": "m", "choices": [choice]} | told
    return answer | {"usage": usage_of(prompt, 1) | {"prompt_tokens_details": None}}


def ids_of(body):
    """Return the tokens of a request's prompt."""
    if (given := (body.get("kv_transfer_params") or {}).get("prompt_token_ids")) is not None:
        return given
    prompt = body["messages"] if "messages" in body else body["prompt"]
    return (
        prompt if prompt and isinstance(prompt[0], int) else [byte % VOCABULARY for byte in json.dumps(prompt).encode()]
    )


def limit_of(body):
    """Return how many tokens a request asks for."""
    return body.get("max_completion_tokens") or body.get("max_tokens") or 16


def events(body, *, name, per_event=1):
    """Return the stream that vLLM would send, event by event."""
    api = Api.CHAT if "messages" in body else Api.COMPLETIONS
    prompt = ids_of(body)
    options = body.get("stream_options") or {}
    head = {"id": name, "object": "chunk", "created": 7, "model": "m"}
    weight = _weight(prompt)
    made = 0
    pending = ""
    is_first = True
    if api is Api.CHAT:
        yield event(
            head | _ids(body, prompt) | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        )
        is_first = False
    limit = limit_of(body)
    is_over = False
    while not is_over:
        ids = []
        text = ""
        for _ in range(min(per_event, limit - made)):
            stops, banned = stops_of(body, made)
            token = _next(weight, len(prompt) + made, banned)
            ids.append(token)
            made += 1
            weight += (len(prompt) + made) * token
            is_end = token in stops
            is_over = is_end or made == limit
            pending += "" if is_end else f" {token}"
            if token % HALF or is_over:
                text += pending
                pending = ""
            if is_end:
                break
        finish = ("stop" if is_end else "length") if is_over else None
        choice = {"index": 0, "logprobs": None, "finish_reason": finish}
        choice |= {"stop_reason": token} if is_end else {}
        choice |= {"token_ids": ids if body.get("return_token_ids") else None}
        choice |= {"text": text} if api is Api.COMPLETIONS else {"delta": {"content": text}}
        if is_first:
            choice |= _ids(body, prompt)
        is_first = False
        usage = {"usage": usage_of(prompt, made)} if options.get("continuous_usage_stats") else {}
        yield event(head | {"choices": [choice]} | usage)
    if options.get("include_usage"):
        yield event(head | {"choices": [], "usage": usage_of(prompt, made)})
    yield b"data: [DONE]\n\n"


def usage_of(prompt, made):
    """Return what an engine counts."""
    return {"prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made}


def event(data):
    """Return one server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def _ids(body, prompt):
    return {"prompt_token_ids": prompt if body.get("return_token_ids") else None}


def read(stream):
    """Return the text, the ids, the last usage and the end of a stream."""
    lines = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    return text, {chunk["id"] for chunk in chunks}, usages[-1:], ends, lines[-1:] == ["[DONE]"]
