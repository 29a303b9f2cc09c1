"""The optional features of a router.

Each is a folder; to remove it, delete the folder and its line in FEATURES. ``kubernetes`` is none:
``pods`` and ``stores`` share it.

A folder may have ``feature.py``, whose FEATURE is a class of ``Feature``; ``settings.py``, whose
SETTINGS is a class of declared settings, and whose POLICIES, if it has some, are names of routing
policies; and ``command.py``, a subcommand of ``pdrelay`` with the folder's name, of which COMMAND
in its ``__init__.py`` says what it does. No other module of the router imports one inside a folder.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from pdrelay_proxy.core.fleet.compatibility import PairsWithin
    from pdrelay_proxy.features.feature import Feature
    from pdrelay_proxy.io.discovery.store import SharedStore
    from pdrelay_proxy.settings import Settings

FEATURES: Final = (
    "expected_ttft",
    "first_token",
    "kv_events",
    "moving_streams",
    "pairs",
    "peers",
    "pods",
    "prompt_arrays",
    "roles",
    "slices",
    "stores",
    "why",
)


@lru_cache(1)
def features() -> "Sequence[type[Feature]]":
    """Return all features. Imported late: their modules import most of the router."""
    return [cast("type[Feature]", module.FEATURE) for module in _modules("feature")]


def has_other_routers(settings: "Settings") -> bool:
    """Tell whether a feature lets this router meet others before the same engines."""
    return any(feature.has_other_routers(settings) for feature in features())


def pairs_within(settings: "Settings") -> "PairsWithin":
    """Return the rule by which a slice limits an engine's partners; without a feature's, none."""
    requirement = next(
        (rule for feature in features() if (rule := feature.pairs_within(settings)) is not None),
        None,
    )
    return requirement or (lambda _slice: None)


def shared_store(settings: "Settings") -> "SharedStore | None":
    """Return where routers keep the engines that operators add; None: each in its memory."""
    return next(
        (store for feature in features() if (store := feature.shared_store(settings)) is not None),
        None,
    )


def for_workers(settings: "Settings", folder: Callable[[], str]) -> Sequence[object]:
    """Return settings of features that workers have in common, in place of the operator's."""
    return [common for feature in features() for common in feature.for_workers(settings, folder)]


@lru_cache(1)
def feature_settings() -> Sequence[type[object]]:
    """Return the settings classes of all features."""
    return [cast("type[object]", module.SETTINGS) for module in _modules("settings")]


@lru_cache(1)
def feature_policies() -> Sequence[str]:
    """Return the features' routing policies: each chooses both engines, by their caches."""
    return [
        name
        for module in _modules("settings")
        for name in cast("tuple[str, ...]", getattr(module, "POLICIES", ()))
    ]


def feature_commands() -> Mapping[str, tuple[str, str]]:
    """Return the features' subcommands by name: the module, not imported, and a description."""
    commands = dict[str, tuple[str, str]]()
    for name in FEATURES:
        place = f"{__name__}.{name}"
        if find_spec(f"{place}.command"):
            commands[name] = f"{place}.command", cast("str", import_module(place).COMMAND)
    return commands


def _modules(part: str) -> Sequence[ModuleType]:
    places = [f"{__name__}.{name}.{part}" for name in FEATURES]
    return [import_module(place) for place in places if find_spec(place)]
