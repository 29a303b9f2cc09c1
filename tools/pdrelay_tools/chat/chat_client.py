"""A client of a router's chat API: streams one answer, and keeps which engines made it."""

import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import httpx
import msgspec

from pdrelay_proxy.console.router_client import CommandFailed
from pdrelay_tools.served_by import LegTiming, parse_server_timing

KEY_VARIABLE: Final = "OPENAI_API_KEY"
# a long prompt is computed before anything comes
_TIMES: Final = httpx.Timeout(300.0, connect=10.0)
_LARGEST_LINE: Final = 8 << 20  # bytes of an event
_LARGEST_ERROR: Final = 1 << 20  # bytes that are read of an error
_HINTS: Final = {
    401: f" (a key for clients goes into {KEY_VARIABLE})",
    403: f" (it is the key in {KEY_VARIABLE})",
}

Message: TypeAlias = Mapping[str, str]


class _ChatWords(msgspec.Struct):
    content: str | None = None


class _ChatChoice(msgspec.Struct):
    delta: _ChatWords


class _ChatUsage(msgspec.Struct):
    completion_tokens: int | None = None


class _ChatFault(msgspec.Struct):
    message: str = ""


class _ChatEvent(msgspec.Struct):
    choices: list[_ChatChoice] = []
    usage: _ChatUsage | None = None
    error: _ChatFault | str | None = None


class _ServedModel(msgspec.Struct):
    id: str


class _ServedModels(msgspec.Struct):
    data: list[_ServedModel]


@dataclass(slots=True)
class ChatTurn:
    """One answer, as far as it came."""

    text: str = ""
    # empty: the router does not say
    legs: dict[str, LegTiming] = field(default_factory=dict[str, LegTiming])
    tokens: int | None = None  # None: the engine did not say
    first_s: float | None = None  # until the first word; None: there was none
    last_s: float = 0.0
    is_whole: bool = False

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of the tokens after the first one; None: not known."""
        if (
            self.tokens is None
            or self.tokens < 2
            or self.first_s is None
            or self.last_s <= self.first_s
        ):
            return None
        return (self.tokens - 1) / (self.last_s - self.first_s)


class ChatClient:
    """Asks one router. httpx and its exceptions stop here."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        headers = {"accept-encoding": "identity"} | (
            {"authorization": f"Bearer {key}"} if key else {}
        )
        verify = ssl.create_default_context() if url.startswith("https://") else False
        self._client = httpx.Client(headers=headers, timeout=_TIMES, trust_env=False, verify=verify)

    def __enter__(self) -> "ChatClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def models(self) -> Sequence[str]:
        """Return the names of the models. Raises CommandFailed."""
        try:
            with self._client.stream("GET", f"{self.url}/v1/models") as response:
                content = _read(response)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as exc:
            raise self._unreachable(exc) from exc
        if response.status_code != 200:
            raise self._refusal(response.status_code, content)
        try:
            return [model.id for model in msgspec.json.decode(content, type=_ServedModels).data]
        except msgspec.MsgspecError as exc:
            raise CommandFailed(
                f"{self.url} answers something else than a router does: {exc}"
            ) from exc

    def answer(
        self, body: Mapping[str, object], turn: ChatTurn, show: Callable[[str], None]
    ) -> None:
        """Stream an answer into the turn, and show its words at once. Raises CommandFailed."""
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        start = time.monotonic()
        try:
            with self._client.stream(
                "POST", f"{self.url}/v1/chat/completions", json=request
            ) as response:
                if response.status_code != 200:
                    raise self._refusal(response.status_code, _read(response))
                turn.legs = parse_server_timing(response.headers.get("server-timing", ""))
                rest = b""
                for piece in response.iter_raw():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        self._read_line(line, turn, show, time.monotonic() - start)
                    if len(rest) > _LARGEST_LINE:
                        raise CommandFailed(
                            f"{self.url} sends an event of more than {_LARGEST_LINE} bytes"
                        )
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as exc:
            raise self._unreachable(exc) from exc
        if not turn.is_whole:
            raise CommandFailed("the answer broke off: the stream ended without its last event")

    def _read_line(
        self, line: bytes, turn: ChatTurn, show: Callable[[str], None], seconds: float
    ) -> None:
        """Read one line of the stream."""
        if not line.startswith(b"data:"):
            return
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            turn.is_whole = True
            return
        try:
            event = msgspec.json.decode(data, type=_ChatEvent)
        except msgspec.MsgspecError as exc:
            raise CommandFailed(f"{self.url} sends an event that is none of a chat: {exc}") from exc
        if event.error is not None:
            message = event.error if isinstance(event.error, str) else event.error.message
            raise CommandFailed(f"the answer broke off: {message}")
        if event.usage is not None:
            turn.tokens = event.usage.completion_tokens
        words = "".join(choice.delta.content or "" for choice in event.choices)
        if words:
            turn.first_s = seconds if turn.first_s is None else turn.first_s
            turn.last_s = seconds
            turn.text += words
            show(words)

    def _unreachable(self, exc: Exception) -> CommandFailed:
        return CommandFailed(
            f"the router at {self.url} cannot be asked: {str(exc) or type(exc).__name__}"
        )

    def _refusal(self, status: int, content: bytes) -> CommandFailed:
        try:
            fault = msgspec.json.decode(content, type=_ChatEvent).error
        except msgspec.MsgspecError:
            fault = None
        message = fault.message if isinstance(fault, _ChatFault) else fault
        words = (message or "it says no more").rstrip(".")
        return CommandFailed(
            f"{self.url} answers with status {status}: {words}{_HINTS.get(status, '')}"
        )


def _read(response: httpx.Response) -> bytes:
    content = b""
    for piece in response.iter_raw():
        content += piece
        if len(content) > _LARGEST_ERROR:
            break
    return content
