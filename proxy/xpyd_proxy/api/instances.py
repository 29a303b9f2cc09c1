"""Routes for operators beyond vLLM's demo: who is there, who leaves, and what would become of a request."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request, Response

from xpyd_proxy.api.adminkey import key_check
from xpyd_proxy.api.audit import Audit
from xpyd_proxy.api.incoming import read_body, require_json
from xpyd_proxy.core.fleet.health import State
from xpyd_proxy.core.fleet.registry import Member, Registry
from xpyd_proxy.core.fleet.target import Target
from xpyd_proxy.core.model import Api, Call, Headers, InstanceId, Role
from xpyd_proxy.core.protocol.request_bodies import parse
from xpyd_proxy.core.raw_json import NotJson, decode
from xpyd_proxy.core.routing.explain import Explainer, Explanation
from xpyd_proxy.errors import (
    AddressError,
    AlreadyKnown,
    BadRequest,
    BodyTooLarge,
    NoInstance,
    UnknownInstance,
    UnknownModel,
    UnsupportedMedia,
)
from xpyd_proxy.io.discovery.reconciler import Elsewhere
from xpyd_proxy.io.discovery.stores import StoreDown
from xpyd_proxy.io.workers.changes import Changes
from xpyd_proxy.settings import Settings

logger = logging.getLogger(__name__)
T = TypeVar("T")
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
_PATHS: Final = ", ".join(Api)


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    """Which engine: by id, or by role and address as in /instances/add (then every rank there)."""

    id: _Text | None = None
    type: Role | None = None
    instance: _Text | None = None


class _Question(msgspec.Struct, forbid_unknown_fields=True):
    """The request that a client would send."""

    path: str
    body: msgspec.Raw
    headers: dict[str, str] = {}


class Row(msgspec.Struct):
    """One engine as operators see it."""

    id: str
    role: str
    address: str
    rank: int | None
    state: str
    why: str
    since_s: float  # seconds in this state
    in_flight: int
    load: float
    models: list[str] | None
    version: str | None
    connector: str | None
    mode: str | None
    revision: str | None
    protocol: str | None  # these two as our connector says
    fingerprint: str | None
    source: str  # who wants it here: static, pods or store
    generation: int  # of that source's view, when it first named the engine


@dataclass(frozen=True, slots=True)
class Desk:
    """What the routes use."""

    registry: Registry
    explainer: Callable[[], Explainer]
    clock: Callable[[], float]  # seconds; the one of the registry's times
    changes: Changes
    is_drained: Callable[[InstanceId], bool] = lambda _: True  # for the other workers, too

    def rows(self, members: Sequence[Member]) -> bytes:
        """Describe engines."""
        return msgspec.json.encode({"instances": [self._row(member) for member in members]})

    def _row(self, member: Member) -> Row:
        row = _row(member, self.clock())
        if member.life.state is State.DRAINED and not self.is_drained(member.instance.id):
            row.state, row.why = State.DRAINING, "another worker has requests there"
        return row

    def found(self, named: _Named) -> Sequence[Member]:
        """Return the engines that are meant.

        Raises:
            UnknownInstance: there is none.
            AddressError: the address is none.
        """
        if named.id is not None:
            return [self.registry.member(InstanceId(named.id))]
        if named.type is None or named.instance is None:
            raise UnknownInstance('name an instance: {"id": "decode-0"} or {"type": "decode", "instance": "host:port"}')
        target = Target.parse(named.instance)
        found = [
            member
            for member in self.registry.members()
            if member.instance.role is named.type and member.instance.address.authority == target.address.authority
        ]
        if not found:
            raise UnknownInstance(f"there is no {named.type} instance at {named.instance}")
        return found


def instance_routes(settings: Settings, desk: Desk, audit: Audit) -> APIRouter:
    """Build the routes; all of them want the operator's key."""
    router = APIRouter(prefix="/instances", dependencies=[Depends(key_check(settings.admin_key, audit))])

    @router.get("")
    async def list_all(request: Request) -> Response:
        with audit.act(request):
            return _json(desk.rows(desk.registry.members()))

    def act(verb: str, on: Callable[[InstanceId], Awaitable[None]]) -> None:
        @router.post(f"/{verb}")
        async def change(request: Request) -> Response:
            with audit.act(request) as act:
                named = await _read(request, _Named, limit=settings.max_body_bytes)
                act.target = named.id or f"{named.type} {named.instance}"
                members = _named(desk, named)
                for member in members:
                    if desk.registry.get(member.instance.id) is member:  # else it went with another rank
                        await _changed(on, member)
                return _json(desk.rows(members))

    act("remove", desk.changes.remove)
    act("drain", desk.changes.drain)
    act("undrain", desk.changes.undrain)

    @router.post("/explain")
    async def explain(request: Request) -> Response:
        with audit.act(request):
            question = await _read(request, _Question, limit=settings.max_body_bytes)
            try:
                return _json(_explained(desk.explainer().explain(_call(question))))
            except (BadRequest, UnknownModel, NoInstance) as exc:
                raise HTTPException(400, f"The request would be refused: {exc}") from exc

    return router


async def _changed(on: Callable[[InstanceId], Awaitable[None]], member: Member) -> None:
    try:
        await on(member.instance.id)
    except AlreadyKnown as exc:
        raise HTTPException(400, str(exc)) from exc
    except UnknownInstance as exc:  # it went while the store was asked
        raise HTTPException(404, str(exc)) from exc
    except Elsewhere as exc:
        raise HTTPException(409, str(exc)) from exc
    except StoreDown as exc:
        raise HTTPException(503, f"The change may or may not have been made: {exc}") from exc
    logger.info("%s is %s", member.instance.id, member.life.state)


def _call(question: _Question) -> Call:
    """Read a request as a client's would be read."""
    if question.path not in tuple(Api):
        raise HTTPException(400, f"{question.path} has no two legs to explain: write one of {_PATHS}")
    fields = parse(bytes(question.body), strip_private=False)
    return Call(Api(question.path), fields, _headers(question.headers), rank=_rank(question.headers))


def _headers(given: dict[str, str]) -> Headers:
    return tuple((name.lower().encode(), value.encode()) for name, value in given.items())


def _rank(given: dict[str, str]) -> int | None:
    text = next((value for name, value in given.items() if name.lower() == "x-data-parallel-rank"), None)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise BadRequest(f"X-data-parallel-rank is {text!r}: write a whole number")
    return int(text)


def _named(desk: Desk, named: _Named) -> Sequence[Member]:
    try:
        return desk.found(named)
    except UnknownInstance as exc:
        raise HTTPException(404, str(exc)) from exc
    except AddressError as exc:
        raise HTTPException(400, str(exc)) from exc


async def _read(request: Request, wanted: type[T], *, limit: int) -> T:
    try:
        require_json(request.scope)
        return decode(await read_body(request.scope, request.receive, limit=limit), wanted)
    except UnsupportedMedia as exc:
        raise HTTPException(415, str(exc)) from exc
    except BodyTooLarge as exc:
        raise HTTPException(413, str(exc)) from exc
    except NotJson as exc:
        raise HTTPException(400, f"The body is not what this route takes: {exc}") from exc


def _row(member: Member, now: float) -> Row:
    instance, life, facts = member.instance, member.life, member.facts
    return Row(
        id=instance.id,
        role=instance.role,
        address=instance.address.authority,
        rank=instance.rank,
        state=life.state,
        why=life.why,
        since_s=round(now - life.since, 3),
        in_flight=member.load.in_flight,
        load=round(member.load.score(now=now), 3),
        models=None if facts.models is None else sorted(facts.models),
        version=facts.version,
        connector=facts.connector,
        mode=facts.mode,
        revision=facts.revision,
        protocol=facts.protocol,
        fingerprint=facts.fingerprint,
        source=member.origin.source,
        generation=member.origin.generation,
    )


def _explained(found: Explanation) -> bytes:
    return msgspec.json.encode(
        {
            "rule": found.rule,
            "prefill": None if found.prefill is None else found.prefill.id,
            "decode": found.decode.id,
            "prefill_body": None if found.prefill_body is None else msgspec.Raw(found.prefill_body),
            "decode_body": msgspec.Raw(found.decode_body),
        }
    )


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
