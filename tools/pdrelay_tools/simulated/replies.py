"""The answers of a simulated engine, in vLLM's forms."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from pdrelay_tools.simulated.rules import (
    Json,
    answer_tokens,
    prompt_ids,
    prompt_tokens,
    prompts_of,
    token_ids,
    token_limit,
    tokens,
    word_id,
)


@dataclass(frozen=True, slots=True)
class _Answered:
    """The request, and the fields that every answer to it has."""

    body: Json
    request_id: str
    model: str
    created: int  # seconds since the epoch

    @property
    def words(self) -> list[str]:
        """The text, where there is one prompt."""
        return tokens(prompts_of(self.body)[0], token_limit(self.body))


@dataclass(frozen=True, slots=True)
class Replies(_Answered):
    """The answer of /v1/completions and /v1/chat/completions, whole or streamed."""

    is_chat: bool
    generated: int = 0  # words at the end of the prompt

    end = b"data: [DONE]\n\n"

    def whole(self) -> Json:
        """Return the answer in one piece."""
        choices = list[Json]()
        for index, words in enumerate(self._texts()):
            text = "".join(words)
            content = (
                {"message": {"role": "assistant", "content": text}}
                if self.is_chat
                else {"text": text}
            )
            ends = {"logprobs": None, "finish_reason": "length", "stop_reason": None}
            choices.append({"index": index, **content, **ends})
        kind = "chat.completion" if self.is_chat else "text_completion"
        answer = self._head(kind) | {"choices": choices, "usage": self._usage()}
        if self._shows_ids:
            choices[0]["token_ids"] = [
                self._word_id(place) for place in range(token_limit(self.body))
            ]
            (answer if self.is_chat else choices[0])["prompt_token_ids"] = self._prompt_ids()
        return answer

    def events(self) -> Iterator[bytes]:
        """Return the answer as server-sent events, up to but without the [DONE]."""
        texts = self._texts()
        prompt_part = {"prompt_token_ids": self._prompt_ids()} if self._shows_ids else {}
        if self.is_chat:
            for index in range(len(texts)):
                yield self._event(
                    {"index": index, "delta": {"role": "assistant", "content": ""}}, prompt_part
                )
        for place in range(token_limit(self.body)):
            for index, words in enumerate(texts):
                content: Json = (
                    {"delta": {"content": words[place]}} if self.is_chat else {"text": words[place]}
                )
                if self._shows_ids:
                    content |= {"token_ids": [self._word_id(place)]} | (
                        {} if self.is_chat or place else prompt_part
                    )
                finish = "length" if place + 1 == len(words) else None
                yield self._event(
                    {"index": index, **content, "logprobs": None, "finish_reason": finish}
                )
        options: Json = self.body.get("stream_options") or {}
        if options.get("include_usage"):
            yield event(self._head(self._chunk_kind()) | {"choices": [], "usage": self._usage()})

    def _texts(self) -> list[list[str]]:
        most = self.generated + token_limit(self.body)
        texts = [tokens(prompt, most)[self.generated :] for prompt in prompts_of(self.body)]
        return [words for words in texts for _ in range(self.body.get("n") or 1)]

    @property
    def _shows_ids(self) -> bool:
        return bool(self.body.get("return_token_ids"))

    def _word_id(self, place: int) -> int:
        return word_id(prompts_of(self.body)[0], self.generated + place)

    def _prompt_ids(self) -> list[int]:
        prompt = prompts_of(self.body)[0]
        return [*prompt_ids(prompt), *(word_id(prompt, place) for place in range(self.generated))]

    def _event(self, choice: Json, more: Json | None = None) -> bytes:
        return event(self._head(self._chunk_kind()) | {"choices": [choice]} | (more or {}))

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _usage(self) -> Json:
        prompt_count = prompt_tokens(self.body) + self.generated
        answer_count = answer_tokens(self.body)
        return {
            "prompt_tokens": prompt_count,
            "completion_tokens": answer_count,
            "total_tokens": prompt_count + answer_count,
        }


def event(data: Json) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def error(status: int, message: str) -> Json:
    """Return an OpenAI-shaped error."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
    kind = kinds.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


@dataclass(frozen=True, slots=True)
class ResponsesReplies(_Answered):
    """The answer of /v1/responses: named events, the last with the whole answer, no [DONE]."""

    end = b""

    def whole(self) -> Json:
        """Return the answer in one piece."""
        text = "".join(self.words)
        message = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": text}],
        }
        return self._response("completed") | {"output": [message], "usage": self._usage()}

    def events(self) -> Iterator[bytes]:
        """Return the answer as server-sent events; the first two say nothing about the engine."""
        for word in ("created", "in_progress"):
            yield named(f"response.{word}", {"response": self._response("in_progress")})
        for word in self.words:
            yield named("response.output_text.delta", {"delta": word})
        yield named("response.completed", {"response": self.whole()})

    def _response(self, status: str) -> Json:
        name = self.body.get("request_id", self.request_id)
        return {
            "id": name,
            "object": "response",
            "status": status,
            "model": self.model,
            "created_at": self.created,
        }

    def _usage(self) -> Json:
        prompt_count = prompt_tokens(self.body)
        answer_count = token_limit(self.body)
        return {
            "input_tokens": prompt_count,
            "output_tokens": answer_count,
            "total_tokens": prompt_count + answer_count,
        }


@dataclass(frozen=True, slots=True)
class MessagesReplies(_Answered):
    """The answer of /v1/messages: named events, of which message_stop is the last."""

    end = b""

    def whole(self) -> Json:
        """Return the answer in one piece."""
        text = "".join(self.words)
        ends: Json = {"stop_reason": "max_tokens", "usage": self._usage()}
        return self._message() | {"content": [{"type": "text", "text": text}]} | ends

    def events(self) -> Iterator[bytes]:
        """Return the answer as server-sent events."""
        yield named("message_start", {"message": self._message() | {"content": []}})
        yield named(
            "content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}
        )
        for word in self.words:
            yield named(
                "content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": word}}
            )
        yield named("content_block_stop", {"index": 0})
        yield named(
            "message_delta", {"delta": {"stop_reason": "max_tokens"}, "usage": self._usage()}
        )
        yield named("message_stop", {})

    def _message(self) -> Json:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
        }

    def _usage(self) -> Json:
        prompt_count = prompt_tokens(self.body)
        answer_count = token_limit(self.body)
        return {
            "input_tokens": prompt_count - 1,
            "cache_read_input_tokens": 1,
            "output_tokens": answer_count,
        }


@dataclass(frozen=True, slots=True)
class TokensReplies(_Answered):
    """The answer of /inference/v1/generate: token ids in place of text."""

    end = b"data: [DONE]\n\n"

    def whole(self) -> Json:
        """Return the answer in one piece."""
        head: Json = {
            "request_id": self._id,
            "output_mode": "tokens",
            "model": self.model,
            "created": self.created,
        }
        return head | {"choices": [self._choice(self._ids, is_last=True)], "usage": self._usage()}

    def events(self) -> Iterator[bytes]:
        """Return the answer as server-sent events, up to but without the [DONE]."""
        for place, token in enumerate(self._ids, start=1):
            choice = self._choice([token], is_last=place == len(self._ids))
            yield event({"request_id": self._id, "output_mode": "tokens", "choices": [choice]})
        options: Json = self.body.get("stream_options") or {}
        if options.get("include_usage"):
            yield event(
                {
                    "request_id": self._id,
                    "output_mode": "tokens",
                    "choices": [],
                    "usage": self._usage(),
                }
            )

    @property
    def _ids(self) -> list[int]:
        return token_ids(prompts_of(self.body)[0], token_limit(self.body))

    @property
    def _id(self) -> str:
        return f"generate-tokens-{self.request_id}"

    def _choice(self, ids: list[int], *, is_last: bool) -> Json:
        return {
            "index": 0,
            "token_ids": ids,
            "finish_reason": "length" if is_last else None,
            "logprobs": None,
        }

    def _usage(self) -> Json:
        prompt_count = prompt_tokens(self.body)
        answer_count = token_limit(self.body)
        return {
            "prompt_tokens": prompt_count,
            "completion_tokens": answer_count,
            "total_tokens": prompt_count + answer_count,
        }


def named(name: str, data: Json) -> bytes:
    """Return one server-sent event that has a name."""
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode({"type": name} | data) + b"\n\n"
