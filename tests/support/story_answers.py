"""What a client of a story reads: an answer of any API, whole or streamed, choice by choice."""

import json
from dataclasses import dataclass, field

from pdrelay_proxy.core.model import Api


@dataclass
class Read:
    """What a client has read of one choice."""

    text: str = ""
    reasoning: str = ""
    tool: str = ""
    logprobs: list = field(default_factory=list)
    ids: list = field(default_factory=list)  # of tokens, and of its prompt, if they are asked for
    prompt_ids: list = field(default_factory=list)
    finish: str | None = None
    usages: list = field(default_factory=list)


def read(api, raw, *, streams):
    """Return the choices by index, the usage, what is the same in all events, and how a body ends."""
    if not streams:
        said = json.loads(raw)
        return _whole(api, said), _usage(said), {_head(said)}, "error" if "error" in said else "whole"
    choices = {}
    usage = None
    heads = set()
    end = None
    for block in raw.decode().replace("\r\n", "\n").split("\n\n"):
        data = [line[5:].strip() for line in block.split("\n") if line.startswith("data:")]
        assert len(data) < 2, block
        if not data:
            continue
        assert end is None or (end == "error" and (data == ["[DONE]"] or '"error"' in data[0])), raw
        if data == ["[DONE]"]:
            end = end or "whole"
            continue
        said = json.loads(data[0])
        if "error" in said or said.get("type") == "error":
            end = "error"
            continue
        end = _take(api, said, choices, heads)
        usage = _usage(said) or usage
    return choices, usage, heads, end


def _head(said):
    inside = said.get("response") or said.get("message") or said
    return inside.get("id", inside.get("request_id")), inside.get("created"), inside.get("model")


def _usage(said):
    return (said.get("response") or said.get("message") or said).get("usage")


def _take(api, said, choices, heads):
    if api in (Api.COMPLETIONS, Api.CHAT, Api.GENERATE):
        heads.add(_head(said))
        for each in said["choices"]:
            seen = choices.setdefault(each["index"], Read())
            seen.prompt_ids += said.get("prompt_token_ids") or []
            _add(api, seen, each)
            if said.get("usage"):
                seen.usages.append((said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"]))
        return None
    seen = choices.setdefault(0, Read())
    kind = said["type"]
    if kind in ("content_block_delta", "response.output_text.delta"):
        seen.text += said["delta"] if isinstance(said["delta"], str) else said["delta"]["text"]
    if kind == "message_delta":
        seen.finish = said["delta"]["stop_reason"]
    if kind == "response.completed":
        assert said["response"]["output"][0]["content"][0]["text"] == seen.text
    return "whole" if kind in ("message_stop", "response.completed") else None


def _add(api, seen, choice):
    if api is Api.GENERATE:
        choice = choice | {"text": "".join(f" {i}" for i in choice["token_ids"]), "token_ids": None}
    seen.ids += choice.get("token_ids") or []
    seen.prompt_ids += choice.get("prompt_token_ids") or []
    assert seen.finish is None, "it has ended twice"
    delta = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    seen.text += delta.get("content") or ""
    seen.reasoning += delta.get("reasoning") or ""
    seen.tool += "".join(call["function"]["arguments"] for call in delta.get("tool_calls") or ())
    logprobs = choice.get("logprobs") or {}
    seen.logprobs += logprobs.get("content") or list(
        zip(logprobs.get("tokens", ()), logprobs.get("text_offset", ()), strict=True)
    )
    seen.finish = choice.get("finish_reason")


def _whole(api, said):
    if "choices" in said:
        choices = {}
        for each in said["choices"]:
            _add(api, choices.setdefault(each["index"], Read(prompt_ids=said.get("prompt_token_ids") or [])), each)
        assert list(choices) == sorted(choices)
        return choices
    content = said.get("content") or (said.get("output") or [{}])[0].get("content") or [{"text": ""}]
    return {0: Read(content[0]["text"], finish=said.get("stop_reason"))}


def counted(usage):
    """Return the tokens of prompt and answer that a usage counts, and of the prompt those that were cached."""
    if usage is None:
        return None, None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
    read_tokens = usage.get("prompt_tokens", usage.get("input_tokens")) + (usage.get("cache_read_input_tokens") or 0)
    return (read_tokens, usage.get("completion_tokens", usage.get("output_tokens"))), cached
