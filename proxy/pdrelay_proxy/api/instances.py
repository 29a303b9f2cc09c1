"""Routes for operators beyond vLLM's demo: list, drain, remove and turn engines, and explain a
request.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute

from pdrelay_proxy.api.operator_route import (
    BODY_ERRORS,
    CHANGE_ERRORS,
    OPERATOR_KEY,
    OPERATORS,
    OperatorAccess,
    not_stored,
    operator_errors,
)
from pdrelay_proxy.api.own_engines import OwnEngines, joining_host, not_own
from pdrelay_proxy.api.schemas import (
    DrainedInstance,
    ExplainRequest,
    ExplainResponse,
    InstanceList,
    InstanceName,
    InstanceRow,
    TurnedInstance,
)
from pdrelay_proxy.api.stepped import finish_in_steps, in_steps
from pdrelay_proxy.core.fleet.fleet_warnings import FleetWarnings
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.lone_engines import lone_engines_in_steps
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.pair_history import PairHistory
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Key, Target
from pdrelay_proxy.core.model import Api, GenerationRequest, InstanceId, Role, first_header
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.routing.explain import Explainer, Explanation
from pdrelay_proxy.core.routing.pair_preference import PairPreference
from pdrelay_proxy.core.routing.routing_hints import hints_of_call, rank_of
from pdrelay_proxy.core.steps import portions
from pdrelay_proxy.errors import (
    AddressError,
    AlreadyKnown,
    BadRequest,
    CannotTurn,
    NoInstance,
    PathNotServed,
    UnknownInstance,
    UnknownModel,
)
from pdrelay_proxy.io.discovery.engine_changes import EngineChanges, NotManagedHere
from pdrelay_proxy.io.discovery.store import StoreDown

_ROWS_AT_ONCE: Final = 50
_RESTING_MOST: Final = 20  # pairs that are listed
_NONE_LONE: Final[Mapping[InstanceId, str]] = {}
_NEEDS_IDS: Final = (
    "streams can only move while the router knows their tokens: set resume_streams "
    "(--resume-streams true), which "
    "holds for streams that begin from then on; or drain without move"
)
_NO_MOVES: Final = "this router has no feature that moves streams: drain without move"
_NO_MOVE: Final = "The join key drains without move: streams would go to engines of others."
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InstanceAdmin:
    """The services of these routes."""

    registry: Registry
    explainer: Explainer
    clock: Callable[[], float]  # seconds; the registry's clock
    changes: EngineChanges
    own: OwnEngines
    moves_streams: bool = False  # the router has a feature that does
    # whether the present settings let streams change their engines
    resumes: Callable[[], bool] = lambda: False
    has_other_routers: bool = False  # other routers send requests to the same engines
    warnings: FleetWarnings = field(default_factory=FleetWarnings)
    preference: PairPreference | None = None  # among engines that fit
    pair_history: PairHistory = field(default_factory=PairHistory)

    def rows(self, members: Sequence[Member], *, host: str | None = None) -> InstanceList:
        """Describe engines; to a joining host without sentences, which may name others' engines."""
        rows = [self._row(member, self.clock(), _NONE_LONE) for member in members]
        if host is not None:
            rows = [row.model_copy(update={"why": "", "warning": None}) for row in rows]
        return InstanceList(instances=rows)

    async def rows_of(self, host: str) -> InstanceList:
        """Describe the engines of a joining host."""
        return self.rows(await self.own.among(host, self.registry.members()), host=host)

    async def lone(self) -> Mapping[InstanceId, str]:
        """Return why engines share no request with any other.

        An engine that alone has its model is left out: that may be intended.
        """
        lone_engines = await finish_in_steps(
            lone_engines_in_steps(self.registry, self.pair_history)
        )
        return {
            name: lone_group.text
            for lone_group in lone_engines
            if lone_group.have_model
            for name in lone_group.engines
        }

    def pieces(self, lone: Mapping[InstanceId, str] = _NONE_LONE) -> Iterator[bytes]:
        """Describe all engines in JSON, in pieces: ten thousand engines take megabytes."""
        before = b'{"instances":['
        members = self.registry.members()
        for portion in portions(members, _ROWS_AT_ONCE):
            now = self.clock()
            rows = [self._row(member, now, lone).model_dump_json() for member in portion]
            yield before + ",".join(rows).encode()
            before = b","
        yield b"]}" if members else before + b"]}"

    def _row(self, member: Member, now: float, lone: Mapping[InstanceId, str]) -> InstanceRow:
        instance = member.instance
        life = member.life
        facts = member.facts
        state = life.state
        why = life.why
        if state is HealthState.DRAINED and member.load.at_other_routers:
            state = HealthState.DRAINING
            why = "another router has requests there"
        drain = member.drain
        is_by_hand = drain is not None and not drain.by_turn
        if self.has_other_routers and is_by_hand and not self.changes.is_drain_shared(member):
            why = f"{why}; by this router alone: give the order to the others, too"
        return InstanceRow(
            id=instance.id,
            role=member.role,
            declared=instance.pool,
            turns_to=None if member.turn is None else member.turn.to,
            address=instance.address.authority,
            rank=instance.rank,
            state=state,
            why=why,
            since_s=round(now - life.since, 3),
            in_flight=member.load.in_flight,
            load=round(member.load.score(now=now), 3),
            models=None if facts.models is None else sorted(facts.models),
            version=facts.version,
            connector=facts.connector,
            mode=facts.mode,
            revision=facts.revision,
            slice=facts.slice,
            protocol=facts.protocol,
            fingerprint=facts.fingerprint,
            source=member.origin.source,
            generation=member.origin.generation,
            warning="; ".join(
                filter(None, [self.warnings.for_engine(instance.id), lone.get(instance.id)])
            )
            or None,
        )

    def slices(self, explanation: Explanation, call: GenerationRequest) -> dict[str, str | None]:
        """Return the slices of a request's engines, and the reason for two, if one is preferred."""
        prefill = explanation.prefill
        decode = explanation.decode
        crossing = None
        if prefill is not None and self.preference is not None:
            crossing = self.preference.reason(prefill, decode, hints_of_call(call))
        return {
            "prefill_slice": None if prefill is None else self.registry.facts(prefill).slice,
            "decode_slice": self.registry.facts(decode).slice,
            "slice_crossing": crossing,
        }

    def resting(self) -> list[dict[str, str]]:
        """List pairs that rest."""
        pairs = self.pair_history.resting()
        return [
            {"prefill": prefill, "decode": decode, "reason": reason}
            for (prefill, decode), reason in pairs[:_RESTING_MOST]
        ]

    def check_movable(self, members: Sequence[Member], host: str | None) -> None:
        """Raise HTTPException if streams cannot move, or the caller may not move them."""
        if host is not None:
            raise HTTPException(403, _NO_MOVE)
        if not self.moves_streams:
            raise HTTPException(409, _NO_MOVES)
        if not self.resumes():
            raise HTTPException(409, _NEEDS_IDS)
        for member in members:
            instance = member.instance
            if member.as_role(Role.DECODE) is None:
                raise HTTPException(
                    400,
                    f"{instance.id} is a prefill engine: it has no streams, drain it without move",
                )

    def members_named(self, named: InstanceName) -> Sequence[Member]:
        """Return the named engines; raises UnknownInstance, or AddressError."""
        if named.id is not None:
            return [self.registry.member(InstanceId(named.id))]
        if named.type is None or named.instance is None:
            raise UnknownInstance(
                'name an instance: {"id": "decode-0"} or {"type": "decode", "instance": '
                '"host:port"}'
            )
        key = Key(named.type, Target.parse(named.instance).address.authority)
        members = self.registry.members_at([key])
        if not members:  # by its present role, which operators see
            members = [
                member
                for member in self.registry.members()
                if member.as_role(key.role) is not None
                and member.instance.address.authority == key.authority
            ]
        if not members:
            raise UnknownInstance(f"there is no {named.type} instance at {named.instance}")
        return members

    async def permitted(self, named: InstanceName, host: str | None) -> Sequence[Member]:
        """Do as ``members_named``; also raises HTTPException: they are not at the joining host."""
        if host is None:
            return self.members_named(named)
        try:
            members = self.members_named(named)
        except UnknownInstance:
            # A host may learn only about its own address that no engine is there.
            is_address = named.id is None and named.instance is not None
            if not is_address or not await self.own.are_at(
                host, [Target.parse(named.instance or "").address]
            ):
                raise not_own(host) from None
            raise
        await self.own.check(host, [member.instance.address for member in members])
        return members


def instance_routes(admin: InstanceAdmin, access: OperatorAccess) -> APIRouter:
    """Build the routes; all need the operator's key, or some the join key."""
    router = _new_router(access.route(takes_join_key=True))
    turning = _new_router(access.route())
    explaining = _new_router(access.route(is_large=True))

    @router.get("", responses=operator_errors(), response_model=InstanceList)
    async def list_all(request: Request) -> Response:
        """List the engines."""
        if (host := joining_host(request)) is not None:
            return Response(
                (await admin.rows_of(host)).model_dump_json(), media_type="application/json"
            )
        return StreamingResponse(
            in_steps(admin.pieces(await admin.lone())), media_type="application/json"
        )

    def act(
        verb: str, change_engine: Callable[[InstanceId], Awaitable[None]], summary: str
    ) -> None:
        @router.post(f"/{verb}", responses=CHANGE_ERRORS, summary=summary)
        async def change(request: Request, named: InstanceName) -> InstanceList:
            request.state.target = named.id or f"{named.type} {named.instance}"
            host = joining_host(request)
            return admin.rows(await _carried_out(admin, named, change_engine, host=host), host=host)

    act("remove", admin.changes.remove, "Forget engines at once")
    act("undrain", admin.changes.undrain, "Send engines requests again")

    @router.post(
        "/drain",
        responses=CHANGE_ERRORS,
        summary=(
            "Send engines nothing new, and say so when they have nothing left; with move streams "
            "go on elsewhere"
        ),
    )
    async def drain(request: Request, named: DrainedInstance) -> InstanceList:
        request.state.target = named.id or f"{named.type} {named.instance}"
        host = joining_host(request)
        drains = partial(admin.changes.drain, moves=named.move)
        return admin.rows(
            await _carried_out(admin, named, drains, host=host, moves=named.move), host=host
        )

    @turning.post(
        "/turn",
        responses=CHANGE_ERRORS,
        summary="Have engines serve another role, as soon as nothing of the old one is left",
    )
    async def turn(request: Request, named: TurnedInstance) -> InstanceList:
        request.state.target = f"{named.id or f'{named.type} {named.instance}'} to {named.to}"
        return admin.rows(
            await _carried_out(
                admin, named, partial(admin.changes.change_role, to=named.to, force=named.force)
            )
        )

    @explaining.post("/explain", responses=BODY_ERRORS, response_model=ExplainResponse)
    async def explain(question: ExplainRequest) -> Response:
        """Say which engines a request would go to, and what each would get."""
        if question.path not in tuple(Api):
            raise HTTPException(
                400, f"{question.path} has no two legs to explain: write one of {', '.join(Api)}"
            )
        headers = tuple(
            (name.lower().encode(), value.encode()) for name, value in question.headers.items()
        )
        try:
            fields = parse(bytes(question.body))
            rank = rank_of(first_header(headers, b"x-data-parallel-rank"))
            call = GenerationRequest(Api(question.path), fields, headers, rank=rank)
            explanation = admin.explainer.explain(call)
        except (BadRequest, UnknownModel, PathNotServed, NoInstance) as exc:
            raise HTTPException(400, f"The request would be refused: {exc}") from exc
        answer = {
            "rule": explanation.rule,
            "prefill": None if explanation.prefill is None else explanation.prefill.id,
            "decode": explanation.decode.id,
            **admin.slices(explanation, call),
            "prefill_body": None
            if explanation.prefill_body is None
            else msgspec.Raw(explanation.prefill_body),
            "decode_body": msgspec.Raw(explanation.decode_body),
            **admin.explainer.terms(call),
            "lone_prompt_bound": explanation.bound,
            "resting_pairs": admin.resting(),
            "expected_ms": None
            if explanation.expected is None
            else explanation.expected.milliseconds,
        }  # its bodies are the bytes for the engines
        return Response(msgspec.json.encode(answer), media_type="application/json")

    # include_router of FastAPI 0.165 drops their tag: the document would show them to everybody.
    router.routes.extend((*turning.routes, *explaining.routes))
    return router


def _new_router(route_class: type[APIRoute]) -> APIRouter:
    return APIRouter(
        prefix="/instances", tags=[OPERATORS], dependencies=[OPERATOR_KEY], route_class=route_class
    )


async def _carried_out(
    admin: InstanceAdmin,
    named: InstanceName,
    change: Callable[[InstanceId], Awaitable[None]],
    *,
    host: str | None = None,
    moves: bool = False,
) -> Sequence[Member]:
    """Change the named engines, and return them; ``host``: of a caller with the join key."""
    try:
        members = await admin.permitted(named, host)
        if moves:
            admin.check_movable(members, host)
        for member in members:
            if (
                admin.registry.get(member.instance.id) is member
            ):  # otherwise it was removed with another rank
                await change(member.instance.id)
                logger.info("%s is %s: %s", member.instance.id, member.life.state, member.life.why)
    except UnknownInstance as exc:
        raise HTTPException(404, str(exc)) from exc
    except (AddressError, AlreadyKnown) as exc:
        raise HTTPException(400, str(exc)) from exc
    except (NotManagedHere, CannotTurn) as exc:
        raise HTTPException(409, str(exc)) from exc
    except StoreDown as exc:
        raise not_stored("The change", "made", exc) from exc
    return members
