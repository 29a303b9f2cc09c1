"""Which model the engines serve."""

import msgspec
from fastapi import APIRouter, Request, Response

from xpyd_proxy.api.incoming import passed_on
from xpyd_proxy.core.model import Answer, Headers, Instance, Role
from xpyd_proxy.core.ports import Engines
from xpyd_proxy.core.raw_json import NotJson, decode
from xpyd_proxy.core.registry import Registry
from xpyd_proxy.errors import EngineError, NoInstance


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Models:
    """Asks engines for their models; remembers the one that all of them should serve."""

    def __init__(self, registry: Registry, engines: Engines, *, model: str | None) -> None:
        self._registry = registry
        self._engines = engines
        self._model = model

    async def listing(self, headers: Headers) -> Answer:
        """Return the list of models of the first engine that answers, decode engines first.

        Raises:
            NoInstance: none answers.
        """
        for instance in self._known():
            answer = await self._ask(instance, headers)
            if answer is not None and answer.status < 500:
                return answer
        raise NoInstance("no engine answers: the router cannot tell the models they serve")

    async def accepts(self, candidate: Instance, headers: Headers) -> bool:
        """Tell whether an engine can be reached and serves our model; the first one ever asked defines it."""
        found = _first(await self._ask(candidate, headers))
        if found is None:
            return False
        expected = self._model or await self._learned(headers) or found
        if self._model is None:  # still, for another addition may have been faster
            self._model = expected
        return found == self._model

    async def _learned(self, headers: Headers) -> str | None:
        for instance in self._known():
            if (model := _first(await self._ask(instance, headers))) is not None:
                return model
        return None

    def _known(self) -> list[Instance]:
        return [*self._registry.known(Role.DECODE), *self._registry.known(Role.PREFILL)]

    async def _ask(self, instance: Instance, headers: Headers) -> Answer | None:
        try:
            return await self._engines.models(instance, headers)
        except EngineError:
            return None


def model_routes(models: Models) -> APIRouter:
    """Build GET /v1/models."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        answer = await models.listing(passed_on(request.scope))
        return Response(answer.body, answer.status, {"content-type": answer.content_type})

    return router


def _first(answer: Answer | None) -> str | None:
    """Return the id of the first model in a list; None when it is no such list."""
    if answer is None or answer.status != 200:
        return None
    try:
        models = decode(answer.body, _Models).data
    except NotJson:
        return None
    return models[0].id if models else None
