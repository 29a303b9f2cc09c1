"""The models that an engine or a router lists."""

from dataclasses import dataclass
from typing import Annotated

import msgspec

from pdrelay_tools.proving.core.answer import Malformed


class _ListedModel(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(max_length=1000)]  # each request has it
    parent: str | None = None  # of an adapter: the model that it belongs to
    max_model_len: int | None = None


class _Listed(msgspec.Struct):
    data: list[_ListedModel]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model that the suite asks, and its adapters."""

    name: str
    adapters: tuple[str, ...]
    max_model_len: int | None  # tokens


def read_models(body: bytes, name: str | None) -> ModelFacts:
    """Read /v1/models; ``name``: the model to ask; None: the first that is no adapter.

    Raises Malformed.
    """
    try:
        listed = msgspec.json.decode(body, type=_Listed).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise Malformed(f"/v1/models: {exc}") from exc
    bases = [card for card in listed if card.parent is None and name in (None, card.id)]
    if not bases:
        raise Malformed("/v1/models lists no model" + (f" called {name}" if name else ""))
    base = bases[0]
    adapters = tuple(card.id for card in listed if card.parent is not None)
    return ModelFacts(base.id, adapters, base.max_model_len)
