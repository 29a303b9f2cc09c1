"""Routes for operators beyond vLLM's demo: who is there, who leaves, and what would become of a request."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Response

from xpyd_proxy.api.admin_key import OPERATOR_KEY
from xpyd_proxy.api.audit import AuditedAction
from xpyd_proxy.api.operator_route import OPERATOR_ERRORS, OPERATORS, SMALL_BODY, OperatorAccess, action_of
from xpyd_proxy.api.schemas import ExplainRequest, ExplainResponse, InstanceList, InstanceName, InstanceRow
from xpyd_proxy.core.fleet.health import HealthState
from xpyd_proxy.core.fleet.registry import Member, Registry
from xpyd_proxy.core.fleet.target import Target
from xpyd_proxy.core.model import Api, GenerationRequest, Headers, InstanceId
from xpyd_proxy.core.protocol.request_bodies import parse
from xpyd_proxy.core.routing.explain import Explainer, Explanation
from xpyd_proxy.errors import (
    AddressError,
    AlreadyKnown,
    BadRequest,
    NoInstance,
    UnknownInstance,
    UnknownModel,
)
from xpyd_proxy.io.discovery.reconciler import Discovery, NotManagedHere
from xpyd_proxy.io.discovery.stores import StoreDown
from xpyd_proxy.settings import Settings

logger = logging.getLogger(__name__)
_PATHS: Final = ", ".join(Api)
_Action = Annotated[AuditedAction, Depends(action_of)]


@dataclass(frozen=True, slots=True)
class InstanceAdmin:
    """What the routes use."""

    registry: Registry
    explainer: Explainer
    clock: Callable[[], float]  # seconds; the one of the registry's times
    discovery: Discovery
    is_drained: Callable[[InstanceId], bool] = lambda _: True  # for the other workers, too

    def rows(self, members: Sequence[Member]) -> InstanceList:
        """Describe engines."""
        return InstanceList(instances=[self._row(member) for member in members])

    def _row(self, member: Member) -> InstanceRow:
        row = _row(member, self.clock())
        if member.life.state is HealthState.DRAINED and not self.is_drained(member.instance.id):
            row.state, row.why = HealthState.DRAINING, "another worker has requests there"
        return row

    def found(self, named: InstanceName) -> Sequence[Member]:
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


def instance_routes(settings: Settings, admin: InstanceAdmin, access: OperatorAccess) -> APIRouter:
    """Build the routes; all of them want the operator's key."""
    small = access.route(body_most=min(SMALL_BODY, settings.max_body_bytes))
    large = access.route(body_most=settings.max_body_bytes)
    router = APIRouter(prefix="/instances", tags=[OPERATORS], dependencies=[OPERATOR_KEY], route_class=small)
    explaining = APIRouter(route_class=large)

    @router.get("", responses=OPERATOR_ERRORS)
    async def list_all() -> InstanceList:
        """List the engines."""
        return admin.rows(admin.registry.members())

    def act(verb: str, on: Callable[[InstanceId], Awaitable[None]], summary: str) -> None:
        @router.post(f"/{verb}", responses=OPERATOR_ERRORS, summary=summary)
        async def change(named: InstanceName, action: _Action) -> InstanceList:
            action.target = named.id or f"{named.type} {named.instance}"
            members = _named(admin, named)
            for member in members:
                if admin.registry.get(member.instance.id) is member:  # else it went with another rank
                    await _changed(on, member)
            return admin.rows(members)

    act("remove", admin.discovery.remove, "Forget engines at once")
    act("drain", admin.discovery.drain, "Send engines nothing new, and say so when they have nothing left")
    act("undrain", admin.discovery.undrain, "Send engines requests again")

    @explaining.post("/explain", responses=OPERATOR_ERRORS, response_model=ExplainResponse)
    async def explain(question: ExplainRequest) -> Response:
        """Say which engines a request would go to, and what each would get."""
        try:
            return _explained(admin.explainer.explain(_call(question)))
        except (BadRequest, UnknownModel, NoInstance) as exc:
            raise HTTPException(400, f"The request would be refused: {exc}") from exc

    router.include_router(explaining)
    return router


async def _changed(on: Callable[[InstanceId], Awaitable[None]], member: Member) -> None:
    try:
        await on(member.instance.id)
    except AlreadyKnown as exc:
        raise HTTPException(400, str(exc)) from exc
    except UnknownInstance as exc:  # it went while the store was asked
        raise HTTPException(404, str(exc)) from exc
    except NotManagedHere as exc:
        raise HTTPException(409, str(exc)) from exc
    except StoreDown as exc:
        raise HTTPException(503, f"The change may or may not have been made: {exc}") from exc
    logger.info("%s is %s", member.instance.id, member.life.state)


def _call(question: ExplainRequest) -> GenerationRequest:
    """Read a request as a client's would be read."""
    if question.path not in tuple(Api):
        raise HTTPException(400, f"{question.path} has no two legs to explain: write one of {_PATHS}")
    fields = parse(bytes(question.body), strip_private=False)
    return GenerationRequest(Api(question.path), fields, _headers(question.headers), rank=_rank(question.headers))


def _headers(given: dict[str, str]) -> Headers:
    return tuple((name.lower().encode(), value.encode()) for name, value in given.items())


def _rank(given: dict[str, str]) -> int | None:
    text = next((value for name, value in given.items() if name.lower() == "x-data-parallel-rank"), None)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise BadRequest(f"X-data-parallel-rank is {text!r}: write a whole number")
    return int(text)


def _named(admin: InstanceAdmin, named: InstanceName) -> Sequence[Member]:
    try:
        return admin.found(named)
    except UnknownInstance as exc:
        raise HTTPException(404, str(exc)) from exc
    except AddressError as exc:
        raise HTTPException(400, str(exc)) from exc


def _row(member: Member, now: float) -> InstanceRow:
    instance, life, facts = member.instance, member.life, member.facts
    return InstanceRow(
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


def _explained(found: Explanation) -> Response:
    """Write an answer: the bodies in it are the bytes that engines would get."""
    body = msgspec.json.encode(
        {
            "rule": found.rule,
            "prefill": None if found.prefill is None else found.prefill.id,
            "decode": found.decode.id,
            "prefill_body": None if found.prefill_body is None else msgspec.Raw(found.prefill_body),
            "decode_body": msgspec.Raw(found.decode_body),
        }
    )
    return Response(body, media_type="application/json")
