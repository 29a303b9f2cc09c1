"""Which model the engines serve."""

import asyncio
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Response

from pdrelay_proxy.api.error_answers import ANY_ROUTE, error_answers
from pdrelay_proxy.api.schemas import ErrorResponse, ServedModels
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import EngineResponse, Headers, Instance, Role
from pdrelay_proxy.core.protocol.response_filter import check_type
from pdrelay_proxy.core.raw_json import NotJson, decode
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
_KEPT_S: Final = 3.0  # for which a list is given again: whoever asks often costs no more
# engines of one set that are asked until one tells its models: some may have died just now
_TRIES: Final = 16
_NEXT_S: Final = 1.0  # without an answer, until another one of the set is asked as well
_AT_ONCE: Final = 32  # engines that are asked at the same time, for all clients


class _ModelId(msgspec.Struct):
    id: str
    parent: str | None = None  # of a LoRA adapter: the model it belongs to
    root: str | None = None  # where its files lie


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


@dataclass(slots=True)
class _Found:
    """What the engines said."""

    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    rounds: int = 0  # in which they were asked
    at: float = 0.0  # seconds; the end of the latest one
    sets: frozenset[object] = frozenset()  # of models that were known then
    answer: EngineResponse | None = None  # None: no engine answered


class ModelCatalog:
    """Asks engines for their models."""

    def __init__(
        self,
        registry: Registry,
        engines: WireEngines,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._engines = engines
        self._clock = clock  # seconds; only differences count
        self._found = _Found()
        self._counted = -1  # changes of the registry when these were sorted
        self._known = dict[object, list[Instance]]()
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def listing(self) -> EngineResponse:
        """Return all engines' models, each once, as decode engines describe them; raises
        NoInstance: none answers.

        Calls at the same time share one answer, as do those of some seconds.
        """
        found = self._found
        rounds = found.rounds
        async with found.asking:
            sets = self._sets()
            is_kept = (
                found.answer is not None
                and self._clock() < found.at + _KEPT_S
                and found.sets == sets.keys()
            )
            # else they were asked while this call waited
            if not is_kept and found.rounds == rounds:
                found.answer = await self._ask_all(list(sets.values()))
                found.rounds = rounds + 1
                found.at = self._clock()
                found.sets = frozenset(sets)
            if found.answer is None:
                raise NoInstance("no engine answers: the router cannot tell the models they serve")
            return found.answer

    def _sets(self) -> dict[object, list[Instance]]:
        """Return the engines of each set of models, the one to ask first; one whose models are not
        known by itself.

        Decode engines come first, and those that seem to be well.
        """
        if self._counted == self._registry.changes.count:
            return self._known
        self._counted = self._registry.changes.count
        members = self._registry.members()
        decodes = [one for one in members if one.role.serves(Role.DECODE)]
        found = dict[object, list[Member]]()
        for one in (*decodes, *[one for one in members if not one.role.serves(Role.DECODE)]):
            models = one.facts.models
            name: object = (
                models if models is not None else one.instance.id if _is_well(one) else "not up"
            )
            found.setdefault(name, []).append(one)
        self._known = {
            name: [one.instance for one in sorted(some, key=lambda one: not _is_well(one))[:_TRIES]]
            for name, some in found.items()
        }
        return self._known

    async def _ask_all(self, sets: Sequence[Sequence[Instance]]) -> EngineResponse | None:
        asked = await asyncio.gather(*[self._ask_some(some) for some in sets])
        answers = [answer for answer in asked if answer is not None]
        lists = [found for answer in answers if (found := _cards(answer)) is not None]
        if not lists:
            # an engine's words: it may want a key, for example
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
            one.facts.models for one in self._registry.members() if one.role.serves(Role.DECODE)
        ]
        known = [models for models in decodes if models is not None]
        if not decodes or len(known) < len(decodes):
            return frozenset()  # one of those that have not said may serve anything
        return self._registry.models.names.difference(*known)

    async def _ask_some(self, engines: Sequence[Instance]) -> EngineResponse | None:
        """Return the first list of some engines; without one, what one of them says; None: none of
        them answers.
        """
        said: EngineResponse | None = None
        waiting = list(engines)
        asking = set[asyncio.Task[EngineResponse | None]]()
        try:
            while waiting or asking:
                if waiting:
                    asking.add(asyncio.create_task(self._ask_in_turn(waiting.pop(0))))
                patience_s = _NEXT_S if waiting else None
                done, asking = await asyncio.wait(
                    asking, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                for answer in [task.result() for task in done]:
                    if answer is not None and _cards(answer) is not None:
                        return answer
                    said = said or answer
        finally:
            for task in asking:
                task.cancel()
            if asking:
                await asyncio.wait(asking)
        return said

    async def _ask_in_turn(self, instance: Instance) -> EngineResponse | None:
        async with self._places:
            answer = await self._ask(instance)
        return None if answer is None or answer.status >= 500 else answer

    async def accepted(self, candidate: Instance, headers: Headers) -> EngineCapabilities:
        """Return which models an engine serves; it is shown a key only if it wants one.

        Raises NotAccepted: it cannot be reached, or serves nothing.
        """
        try:
            answer = await self._engines.models(candidate, headers, bare=True)
            if answer.status in _WANTS_A_KEY:
                answer = await self._engines.models(candidate, headers)
        except EngineError as exc:
            raise NotAccepted(str(exc)) from exc
        ids = [decode(card, _ModelId) for _, card in _cards(answer) or ()]
        names = [each.id for each in ids]
        if not names:
            raise NotAccepted(
                f"{candidate.id} answers /v1/models with status {answer.status}, and names no model"
            )
        adapters = frozenset([each.id for each in ids if each.parent is not None])
        root = next((each.root for each in ids if each.parent is None), None)
        return EngineCapabilities(frozenset(names), adapters=adapters, root=root)

    async def _ask(self, instance: Instance) -> EngineResponse | None:
        try:
            return await self._engines.models(instance, ())
        except EngineError:
            return None


def model_routes(models: ModelCatalog, keys: Sequence[Any] = ()) -> APIRouter:
    """Build GET /v1/models; ``keys``: CLIENT_KEYS, if clients must show one."""
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
    """Return the ids and the descriptions in a list; None when it is no such list."""
    try:
        cards = decode(answer.body, _ModelList).data if answer.status == 200 else None
        return None if cards is None else [(decode(card, _ModelId).id, card) for card in cards]
    except NotJson:
        return None
