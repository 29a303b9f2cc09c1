"""Which model the engines serve."""

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from xpyd_proxy.api.operator_route import passed_on
from xpyd_proxy.api.schemas import ErrorResponse, ServedModels
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import EngineResponse, Headers, Instance, Role
from xpyd_proxy.core.protocol.response_filter import check_type
from xpyd_proxy.core.raw_json import NotJson, decode
from xpyd_proxy.errors import EngineError, NoInstance
from xpyd_proxy.io.wire import WireEngines

_WANTS_A_KEY: Final = (401, 403)


class _ModelId(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


class ModelCatalog:
    """Asks engines for their models. ``model``: what an added one must serve; None: anything."""

    def __init__(self, registry: Registry, engines: WireEngines, *, model: str | None) -> None:
        self._registry = registry
        self._engines = engines
        self._model = model

    async def listing(self, headers: Headers) -> EngineResponse:
        """Return all engines' models, each once, as decode engines describe them; raises NoInstance: none answers."""
        known = [*self._registry.known(Role.DECODE), *self._registry.known(Role.PREFILL)]
        asked = await asyncio.gather(*(self._ask(instance, headers) for instance in known))
        answers = [answer for answer in asked if answer is not None and answer.status < 500]
        if not answers:
            raise NoInstance("no engine answers: the router cannot tell the models they serve")
        lists = [found for answer in answers if (found := _cards(answer)) is not None]
        if not lists:
            return answers[0]  # an engine's words: it may want a key, for example
        cards: dict[str, msgspec.Raw] = {}
        for name, card in chain.from_iterable(lists):
            cards.setdefault(name, card)
        body = msgspec.json.encode({"object": "list", "data": list(cards.values())})
        return EngineResponse(200, "application/json", body)

    async def accepted(self, candidate: Instance, headers: Headers) -> frozenset[str] | None:
        """Return what an engine serves; None: it cannot be reached, serves nothing, or not first the one it must.

        It is shown a key only if it wants one.
        """
        answer = await self._ask(candidate, headers, bare=True)
        if answer is not None and answer.status in _WANTS_A_KEY:
            answer = await self._ask(candidate, headers)
        names = [name for name, _ in (None if answer is None else _cards(answer)) or ()]
        if not names or self._model not in (None, names[0]):
            return None
        return frozenset(names)

    async def _ask(self, instance: Instance, headers: Headers, *, bare: bool = False) -> EngineResponse | None:
        try:
            return await self._engines.models(instance, headers, bare=bare)
        except EngineError:
            return None


def model_routes(models: ModelCatalog, keys: Sequence[Any] = ()) -> APIRouter:
    """Build GET /v1/models; ``keys``: CLIENT_KEYS, if clients must show one."""
    router = APIRouter(tags=["models"], dependencies=keys)

    @router.get("/v1/models", response_model=ServedModels, responses={503: {"model": ErrorResponse}})
    async def list_models(request: Request) -> Response:
        """List the models of all engines, each once."""
        answer = await models.listing(passed_on(request.scope))
        check_type("an engine", answer.content_type.encode("latin-1"))
        return Response(answer.body, answer.status, {"content-type": answer.content_type})

    return router


def _cards(answer: EngineResponse) -> list[tuple[str, msgspec.Raw]] | None:
    """Return the ids and the descriptions in a list; None when it is no such list."""
    try:
        cards = decode(answer.body, _ModelList).data if answer.status == 200 else None
        return None if cards is None else [(decode(card, _ModelId).id, card) for card in cards]
    except NotJson:
        return None
