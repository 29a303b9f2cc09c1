"""The models that the engines serve."""

import asyncio
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Response

from pdrelay_proxy.api.error_answers import ANY_ROUTE, error_answers
from pdrelay_proxy.api.schemas import ErrorResponse, ServedModels
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities, facts_of_models
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import EngineResponse, Headers, Instance, Role
from pdrelay_proxy.core.protocol.response_filter import check_type
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.core.schemas import MOST_MODELS, ModelCard
from pdrelay_proxy.errors import EngineError, NoInstance, NotAccepted, Refused
from pdrelay_proxy.io.wire import WireEngines

_ERRORS: Final[dict[int | str, str]] = {
    401: "No API key, or one that the router does not know",
    "4XX": "What an engine says, if each refuses",
    502: "An engine answers with something else",
    503: "No engine answers",
    **ANY_ROUTE,
}
_WANTS_A_KEY: Final = (401, 403)
_KEPT_S: Final = 3.0  # for which a list is reused, however often clients ask
# engines of one set that are tried until one lists its models: some may have just died
_TRIES: Final = 16
_NEXT_S: Final = 1.0  # without an answer, until another engine of the set is tried as well
_AT_ONCE: Final = 32  # concurrent requests to engines, for all clients


class _ModelList(msgspec.Struct):
    data: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_MODELS)]


@dataclass(slots=True)
class _Listing:
    """The engines' latest answer."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    rounds: int = 0  # rounds of requests
    at: float = 0.0  # seconds; the end of the latest round
    sets: frozenset[object] = frozenset()  # the sets of models known then
    answer: EngineResponse | None = None  # None: no engine answered


class ModelCatalog:
    """Requests the engines' models."""

    def __init__(
        self,
        registry: Registry,
        engines: WireEngines,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._engines = engines
        self._clock = clock  # seconds; only differences count
        self._listing = _Listing()
        self._counted = -1  # the registry's generation when ``_known`` was built
        self._known = dict[object, list[Instance]]()
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def listing(self) -> EngineResponse:
        """Return all engines' models, each once, as decode engines describe them; raises
        NoInstance: none answers.

        Concurrent calls share one answer, and so do those of some seconds.
        """
        listing = self._listing
        rounds = listing.rounds
        async with listing.lock:
            sets = self._sets()
            is_kept = (
                listing.answer is not None
                and self._clock() < listing.at + _KEPT_S
                and listing.sets == sets.keys()
            )
            # if the round changed, another call has asked them meanwhile
            if not is_kept and listing.rounds == rounds:
                listing.answer = await self._request_all(list(sets.values()))
                listing.rounds = rounds + 1
                listing.at = self._clock()
                listing.sets = frozenset(sets)
            if listing.answer is None:
                raise NoInstance("no engine answers: the router cannot tell the models they serve")
            return listing.answer

    def _sets(self) -> dict[object, list[Instance]]:
        """Return the engines of each set of models, in the order to try; one with unknown models by
        itself.

        Decode engines come first, and engines that seem to be well.
        """
        if self._counted == self._registry.changes.count:
            return self._known
        self._counted = self._registry.changes.count
        members = self._registry.members()
        decodes = [member for member in members if member.role.serves(Role.DECODE)]
        members_by_models = dict[object, list[Member]]()
        for member in (
            *decodes,
            *[member for member in members if not member.role.serves(Role.DECODE)],
        ):
            models = member.facts.models
            name: object = (
                models
                if models is not None
                else member.instance.id
                if _is_well(member)
                else "not up"
            )
            members_by_models.setdefault(name, []).append(member)
        self._known = {
            name: [
                member.instance
                for member in sorted(members_of_set, key=lambda member: not _is_well(member))[
                    :_TRIES
                ]
            ]
            for name, members_of_set in members_by_models.items()
        }
        return self._known

    async def _request_all(self, sets: Sequence[Sequence[Instance]]) -> EngineResponse | None:
        results = await asyncio.gather(*[self._request_some(engines) for engines in sets])
        answers = [answer for answer in results if answer is not None]
        lists = [
            cards_of_answer for answer in answers if (cards_of_answer := _cards(answer)) is not None
        ]
        if not lists:
            # an engine's own error, for instance a missing key
            return answers[0] if answers else None
        cards: dict[str, msgspec.Raw] = {}
        refused = self._refused()
        for name, card in chain.from_iterable(lists):
            if name not in refused:
                cards.setdefault(name, card)
        body = msgspec.json.encode({"object": "list", "data": list(cards.values())})
        return EngineResponse(200, "application/json", body)

    def _refused(self) -> Set[str]:
        """Return the models that no decode engine serves, so that requests for them are refused."""
        decodes = [
            member.facts.models
            for member in self._registry.members()
            if member.role.serves(Role.DECODE)
        ]
        known = [models for models in decodes if models is not None]
        if not decodes or len(known) < len(decodes):
            return frozenset()  # an engine whose models are unknown may serve any
        return self._registry.models.names.difference(*known)

    async def _request_some(self, engines: Sequence[Instance]) -> EngineResponse | None:
        """Return the first list of some engines, else another answer; None: none answers."""
        other_answer: EngineResponse | None = None
        waiting = list(engines)
        asking = set[asyncio.Task[EngineResponse | None]]()
        try:
            while waiting or asking:
                if waiting:
                    asking.add(asyncio.create_task(self._request_when_free(waiting.pop(0))))
                patience_s = _NEXT_S if waiting else None
                done, asking = await asyncio.wait(
                    asking, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                for answer in [task.result() for task in done]:
                    if answer is not None and _cards(answer) is not None:
                        return answer
                    other_answer = other_answer or answer
        finally:
            for task in asking:
                task.cancel()
            if asking:
                await asyncio.wait(asking)
        return other_answer

    async def _request_when_free(self, instance: Instance) -> EngineResponse | None:
        async with self._places:
            answer = await self._request(instance)
        return None if answer is None or answer.status >= 500 else answer

    async def accepted(self, candidate: Instance, headers: Headers) -> EngineCapabilities:
        """Return the models that an engine serves; it gets a key only if it wants one.

        Raises NotAccepted: it cannot be reached, or serves nothing.
        """
        try:
            answer = await self._engines.models(candidate, headers, bare=True)
            if answer.status in _WANTS_A_KEY:
                answer = await self._engines.models(candidate, headers)
        except EngineError as exc:
            raise NotAccepted(str(exc)) from exc
        cards = [decode(card, ModelCard) for _, card in _cards(answer) or ()]
        if not cards:
            raise NotAccepted(
                f"{candidate.id} answers /v1/models with status {answer.status}, and names no model"
            )
        return facts_of_models(cards)

    async def _request(self, instance: Instance) -> EngineResponse | None:
        try:
            return await self._engines.models(instance, ())
        except EngineError:
            return None


def model_routes(models: ModelCatalog, keys: Sequence[Any] = ()) -> APIRouter:
    """Build GET /v1/models; ``keys``: CLIENT_KEYS, if clients need one."""
    router = APIRouter(tags=["models"], dependencies=keys)

    @router.get(
        "/v1/models", response_model=ServedModels, responses=error_answers(ErrorResponse, _ERRORS)
    )
    async def list_models() -> Response:
        """List the models of all engines, each once."""
        answer = await models.listing()
        if answer.status >= 400:
            raise Refused(answer.status, answer.content_type, answer.body)
        check_type("an engine", answer.content_type.encode("latin-1"))
        return Response(answer.body, answer.status, {"content-type": answer.content_type})

    return router


def _is_well(member: Member) -> bool:
    return not member.life.misses and member.life.state is not HealthState.EJECTED


def _cards(answer: EngineResponse) -> list[tuple[str, msgspec.Raw]] | None:
    """Return the ids and descriptions in a list; None: it is not such a list."""
    try:
        cards = decode(answer.body, _ModelList).data if answer.status == 200 else None
        answer.body.decode()  # of what is not read, which the list of all has, too
        return None if cards is None else [(decode(card, ModelCard).id, card) for card in cards]
    except (NotJson, UnicodeDecodeError):
        return None
