"""``pdrelay chat``: a conversation in the terminal that shows which engines served each turn.

docs/real-model.md has an example.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

from pdrelay_proxy.console.flag_values import server_url, whole_number
from pdrelay_proxy.console.router_access import ROUTER_VARIABLE
from pdrelay_proxy.console.router_client import CommandFailed
from pdrelay_proxy.console.tables import in_lines, printable
from pdrelay_proxy.core.one_line import shortened
from pdrelay_proxy.errors import ConfigError
from pdrelay_tools.chat.chat_client import KEY_VARIABLE, ChatClient, ChatTurn, Message
from pdrelay_tools.chat.kv_meter import KvMeter
from pdrelay_tools.served_by import LegTiming

_PROMPT: Final = "> "
_NEW: Final = "/new"  # a line that begins another conversation
_MAX_TOKENS: Final = 256
_MOST_TOKENS: Final = 1_000_000
_LONGEST_LINE: Final = 1 << 20  # bytes of a question that is piped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    router = os.environ.get(ROUTER_VARIABLE) or "http://127.0.0.1:8000"
    help_text = f"URL of the router (default: ${ROUTER_VARIABLE}, now {router})"
    add("--url", default=router, metavar="URL", help=help_text)
    add(
        "--model",
        metavar="NAME",
        help="model to talk to (default: the first one that the router serves)",
    )
    help_text = "most tokens of an answer (default: %(default)s)"
    add(
        "--max-tokens",
        type=whole_number("a number of tokens", 1, _MOST_TOKENS),
        default=_MAX_TOKENS,
        metavar="N",
        help=help_text,
    )
    add(
        "--system",
        metavar="TEXT",
        help="system message at the beginning (default: that of the chat template)",
    )
    help_text = (
        f"A key for clients goes into {KEY_VARIABLE}. {_NEW} begins another conversation; Ctrl-C "
        f"stops an answer"
    )
    parser.epilog = f"{help_text}, Ctrl-D ends."
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends; return the exit code: 0, 1 an answer failed, 2 wrong flags."""
    try:
        url = server_url(args.url).removesuffix("/v1")
        with ChatClient(url, os.environ.get(KEY_VARIABLE)) as client:
            model = _choose_model(client, args.model)
            first: list[Message] = (
                [] if args.system is None else [{"role": "system", "content": _utf8(args.system)}]
            )
            body = {"model": model, "max_tokens": args.max_tokens, "temperature": 0}
            return _TerminalChat(client, KvMeter(url), body, first).talk()
    except (CommandFailed, ConfigError) as exc:
        _complain(exc)
        return 2 if isinstance(exc, ConfigError) else 1


def _choose_model(client: ChatClient, name: str | None) -> str:
    served = client.models()
    if name is None and not served:
        raise CommandFailed(f"{client.url} serves no model yet")
    if name is not None and name not in served:
        raise CommandFailed(
            f"{client.url} does not serve {name}: it serves {', '.join(served) or 'nothing yet'}"
        )
    return name or served[0]


class _TerminalChat:
    """A conversation: each question is sent with all messages before it."""

    def __init__(
        self, client: ChatClient, meter: KvMeter, body: Mapping[str, object], first: list[Message]
    ) -> None:
        self._client = client
        self._meter = meter
        self._body = body
        self._first = first
        self._messages = [*first]
        self._is_terminal = sys.stdin.isatty()

    def talk(self) -> int:
        """Answer each line of the input."""
        code = 0
        if self._is_terminal:
            keys = f"Ctrl-C stops an answer, {_NEW} begins anew, Ctrl-D ends"
            _write(f"{self._body['model']} at {self._client.url}. {keys}.\n")
        for line in _lines(is_terminal=self._is_terminal):
            if line == _NEW:
                self._messages = [*self._first]
                continue
            try:
                self._answer(line)
            except CommandFailed as exc:
                _complain(exc)
                code = 1
                if not self._is_terminal:  # what follows may build on the answer
                    break
        return code

    def _answer(self, question: str) -> None:
        turn = ChatTurn()
        messages: list[Message] = [*self._messages, {"role": "user", "content": question}]
        try:
            self._meter.start()
            self._client.answer({**self._body, "messages": messages}, turn, _write_words)
        except KeyboardInterrupt:  # the words so far stay part of the conversation
            pass
        finally:
            _write("\n" if turn.text else "")
        if turn.text or turn.is_whole:
            self._messages = [*messages, {"role": "assistant", "content": turn.text}]
        engines = [turn.legs[name].engine for name in ("prefill", "decode") if name in turn.legs]
        try:
            moved = self._meter.moved(engines)
        except KeyboardInterrupt:
            moved = "unknown (stopped)"
        _write(f"  {printable(in_lines(facts_of(turn, moved)))}\n")


def facts_of(turn: ChatTurn, moved: str) -> str:
    """Return the line below an answer; ``moved``: the KV that moved, in words."""
    facts = [_served_by(turn.legs)]
    facts.append(
        "no token" if turn.first_s is None else f"first token after {turn.first_s * 1e3:.0f} ms"
    )
    rate = turn.tokens_per_s
    facts.append("tokens/s unknown" if rate is None else f"{rate:.1f} tokens/s")
    facts.append(
        f"KV moved: {moved if turn.legs else 'unknown (the router does not say who served)'}"
    )
    return ", ".join(facts) + ("" if turn.is_whole else "; stopped")


def _served_by(legs: Mapping[str, LegTiming]) -> str:
    decode = legs.get("decode")
    if decode is None:
        return "P and D unknown"
    if prefill := legs.get("prefill"):
        return f"P {prefill.engine}, D {decode.engine}"
    reason = f" ({legs['reason'].engine})" if "reason" in legs else ""
    return f"D {decode.engine} alone{reason}"


def _lines(*, is_terminal: bool) -> Iterator[str]:
    """Yield the typed or piped lines, without the empty ones."""
    for line in _typed() if is_terminal else _piped():
        if text := _utf8(line).strip():
            yield text


def _typed() -> Iterator[str]:
    with suppress(ImportError):
        importlib.import_module("readline")  # with it `input` edits its line and has a history
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            _write("\n")
            return
        except KeyboardInterrupt:
            _write("\n")  # Ctrl-C at the prompt drops the line, as in a shell


def _piped() -> Iterator[str]:
    while line := sys.stdin.buffer.readline(_LONGEST_LINE):
        yield line.decode(errors="replace")


def _utf8(text: str) -> str:
    """Replace lone surrogates, which a terminal in another encoding may send."""
    return text.encode(errors="replace").decode()


def _write_words(words: str) -> None:
    _write(printable(words))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _complain(exc: Exception) -> None:
    sys.stderr.write(f"pdrelay chat: {printable(in_lines(shortened(str(exc))))}\n")
