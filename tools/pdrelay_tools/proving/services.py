"""Services under test: one engine, a router, or engine pairs between which the suite routes."""

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from pdrelay_tools.http_reply import Reply
from pdrelay_tools.http_server import HttpServer
from pdrelay_tools.proving.core.answer import Malformed
from pdrelay_tools.proving.core.handover import (
    Handover,
    decode_body,
    prefill_body,
    push_params,
    read_handover,
    with_transfer,
)
from pdrelay_tools.proving.core.question import Json, Question


class PrefillFailed(Exception):
    """A prefill leg's ``reply`` has no kv_transfer_params."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.failure())
        self.reply = reply


class Service(Protocol):
    """Answers questions."""

    @property
    def name(self) -> str:
        """Its name in the report."""
        ...

    async def ask(self, question: Question, *, timeout_s: float) -> Reply:
        """Ask a question; does not raise: errors are in the reply."""
        ...

    async def leave(
        self,
        question: Question,
        *,
        timeout_s: float,
        after_s: float,
        after_events: int | None = None,
    ) -> Reply:
        """Ask, and hang up after so many seconds, or after so many events of the stream.

        ``timeout_s``: for a prefill engine's answer, before the stream.
        """
        ...


class SingleServer:
    """A single engine, or a router."""

    def __init__(self, server: HttpServer, model: str) -> None:
        self.server = server
        self._model = model

    @property
    def name(self) -> str:
        """Return the server's name."""
        return self.server.name

    async def ask(self, question: Question, *, timeout_s: float) -> Reply:
        """Post it."""
        return await self.server.post(
            question.path,
            question.body(self._model),
            timeout_s=timeout_s,
            request_id=new_request_id(),
        )

    async def leave(
        self,
        question: Question,
        *,
        timeout_s: float,
        after_s: float,
        after_events: int | None = None,
    ) -> Reply:
        """Post it and hang up."""
        del timeout_s  # a router keeps its own
        body = question.body(self._model)
        return await self.server.leave(
            question.path,
            body,
            after_s=after_s,
            after_events=after_events,
            request_id=new_request_id(),
        )


class EnginePairs:
    """Sends both legs of each request to the next pair of engines, round robin.

    Pushing engines get both legs at once.
    """

    def __init__(
        self, prefill: Sequence[HttpServer], decode: Sequence[HttpServer], model: str
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.model = model
        self._next_pairs = itertools.cycle(itertools.product(prefill, decode))
        self._push_coordinates: dict[str, Json] = {}  # pushing prefill engines, by name

    @property
    def name(self) -> str:
        """Return the numbers of engines, as 2P1D."""
        return f"{len(self.prefill)}P{len(self.decode)}D"

    @property
    def is_push(self) -> bool:
        """Whether a prefill engine has answered in push mode."""
        return bool(self._push_coordinates)

    def forget(self) -> None:
        """Forget the coordinates of prefill engines: one was restarted."""
        self._push_coordinates.clear()

    async def ask(self, question: Question, *, timeout_s: float) -> Reply:
        """Send both legs to the next pair."""
        prefill, decode = next(self._next_pairs)
        return await self.ask_pair(question, prefill, decode, timeout_s=timeout_s)

    async def ask_pair(
        self, question: Question, prefill: HttpServer, decode: HttpServer, *, timeout_s: float
    ) -> Reply:
        """Send both legs to a certain pair."""
        if (coordinates := self._push_coordinates.get(prefill.name)) is not None:
            return await self._at_once(question, prefill, decode, coordinates, timeout_s=timeout_s)
        return await self._in_turn(question, prefill, decode, timeout_s=timeout_s)

    async def _in_turn(
        self, question: Question, prefill: HttpServer, decode: HttpServer, *, timeout_s: float
    ) -> Reply:
        request = new_request_id()
        transfer = new_transfer()
        try:
            first, handover = await self.prefill_leg(
                question, prefill, request, transfer, timeout_s=timeout_s
            )
        except PrefillFailed as exc:
            return exc.reply
        params = with_transfer(handover, transfer)
        left_s = max(0.1, timeout_s - first.seconds)
        reply = await self.decode_leg(question, decode, params, request, timeout_s=left_s)
        return replace(reply, sent_at=first.sent_at, seconds=first.seconds + reply.seconds)

    async def _at_once(
        self,
        question: Question,
        prefill: HttpServer,
        decode: HttpServer,
        coordinates: Json,
        *,
        timeout_s: float,
    ) -> Reply:
        request = new_request_id()
        transfer = new_transfer()
        params = push_params(coordinates, question, request, transfer)
        answering = asyncio.create_task(
            self.decode_leg(question, decode, params, request, timeout_s=timeout_s)
        )
        try:
            await self.prefill_leg(question, prefill, request, transfer, timeout_s=timeout_s)
            return await answering
        except PrefillFailed as exc:
            return answering.result() if answering.done() else exc.reply
        finally:
            answering.cancel()
            await asyncio.wait([answering])

    async def prefill_leg(
        self,
        question: Question,
        prefill: HttpServer,
        request: str,
        transfer: str,
        *,
        timeout_s: float,
    ) -> tuple[Reply, Handover]:
        """Send a prefill leg; return its reply and its params. Raises PrefillFailed."""
        body = prefill_body(question, self.model, transfer)
        reply = await prefill.post(question.path, body, timeout_s=timeout_s, request_id=request)
        if reply.failure():
            raise PrefillFailed(reply)
        try:
            handover = read_handover(reply.body)
        except Malformed as exc:
            raise PrefillFailed(replace(reply, reason=f"{prefill.name}: {exc}")) from exc
        if handover.is_push:
            self._push_coordinates[prefill.name] = handover.coordinates()
        return reply, handover

    async def decode_leg(
        self,
        question: Question,
        decode: HttpServer,
        params: Json | msgspec.Raw,
        request: str,
        *,
        timeout_s: float,
    ) -> Reply:
        """Send a decode leg."""
        body = decode_body(question, self.model, params)
        return await decode.post(question.path, body, timeout_s=timeout_s, request_id=request)

    async def leave(
        self,
        question: Question,
        *,
        timeout_s: float,
        after_s: float,
        after_events: int | None = None,
    ) -> Reply:
        """Send both legs and close the decode leg, as a router does when its client hangs up."""
        prefill, decode = next(self._next_pairs)
        request = new_request_id()
        transfer = new_transfer()
        try:
            first, handover = await self.prefill_leg(
                question, prefill, request, transfer, timeout_s=timeout_s
            )
        except PrefillFailed as exc:
            return exc.reply
        body = decode_body(question, self.model, with_transfer(handover, transfer))
        reply = await decode.leave(
            question.path, body, after_s=after_s, after_events=after_events, request_id=request
        )
        return replace(reply, sent_at=first.sent_at)


def new_request_id() -> str:
    """Return a new id of a request, which both its legs have."""
    return f"prove-{uuid.uuid4().hex}"


def new_transfer() -> str:
    """Return a new id of a transfer."""
    return uuid.uuid4().hex
