"""The answers of a pretended engine, in vLLM's shapes."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from xpyd_proxy.testing.rules import Json, prompt_tokens, prompts_of, token_limit, tokens


@dataclass(frozen=True, slots=True)
class Replies:
    """Both forms of the answer to one request."""

    body: Json
    is_chat: bool
    request_id: str
    model: str
    created: int  # seconds since the epoch

    end = b"data: [DONE]\n\n"

    def whole(self) -> Json:
        """Return the answer in one piece."""
        choices = [self._choice(index, "".join(words)) for index, words in enumerate(self._texts())]
        kind = "chat.completion" if self.is_chat else "text_completion"
        tells: Json = {"prompt_token_ids": [1, 2, 3]} if self.is_chat and self.body.get("return_token_ids") else {}
        return self._head(kind) | {"choices": choices, "usage": self._usage()} | tells

    def events(self) -> Iterator[bytes]:
        """Return the answer as server-sent events, up to but without the [DONE]."""
        texts = self._texts()
        if self.is_chat:
            for index in range(len(texts)):
                yield self._event({"index": index, "delta": {"role": "assistant", "content": ""}})
        for place in range(token_limit(self.body)):
            for index, words in enumerate(texts):
                yield self._event(self._piece(index, words[place], is_last=place + 1 == len(words)))
        options: Json = self.body.get("stream_options") or {}
        if options.get("include_usage"):
            yield event(self._head(self._chunk_kind()) | {"choices": [], "usage": self._usage()})

    def _texts(self) -> list[list[str]]:
        prompts = [prompt for prompt in prompts_of(self.body) for _ in range(self.body.get("n") or 1)]
        return [tokens(prompt, token_limit(self.body)) for prompt in prompts]

    def _choice(self, index: int, text: str) -> Json:
        said = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {"index": index, **said, "logprobs": None, "finish_reason": "length", "stop_reason": None}

    def _piece(self, index: int, word: str, *, is_last: bool) -> Json:
        said = {"delta": {"content": word}} if self.is_chat else {"text": word}
        return {"index": index, **said, "logprobs": None, "finish_reason": "length" if is_last else None}

    def _event(self, choice: Json) -> bytes:
        return event(self._head(self._chunk_kind()) | {"choices": [choice]})

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.request_id}", "object": kind, "created": self.created, "model": self.model}

    def _usage(self) -> Json:
        asked, made = prompt_tokens(self.body), sum(map(len, self._texts()))
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


def event(data: Json) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def error(status: int, message: str) -> Json:
    """Return an OpenAI-shaped error."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
    kind = kinds.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
