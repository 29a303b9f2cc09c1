"""What a router does beyond serving requests.

Each feature is a folder; without its folder and its line, it is gone.

A folder may have ``feature.py``, whose FEATURE is a class of ``Feature``; ``settings.py``, whose
SETTINGS is a class of declared settings, and whose POLICIES, if it has some, are names of routing
policies; and ``command.py``, a subcommand of ``pdrelay`` with the folder's name, of which COMMAND
in its ``__init__.py`` says what it does. No other module of the router imports one inside a folder.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from pdrelay_proxy.core.fleet.compatibility import PairsWithin
    from pdrelay_proxy.features.feature import Feature
    from pdrelay_proxy.settings import Settings

FEATURES: Final = (
    "expected_ttft",
    "kv_events",
    "pairs",
    "peers",
    "pods",
    "prompt_arrays",
    "roles",
    "slices",
    "why",
)


@lru_cache(1)
def features() -> "Sequence[type[Feature]]":
    """Return all features. Their modules import what a router consists of."""
    return [cast("type[Feature]", module.FEATURE) for module in _modules("feature")]


def has_other_routers(settings: "Settings") -> bool:
    """Tell whether other routers send requests to the same engines, and some feature has them
    meet.
    """
    return any(feature.has_other_routers(settings) for feature in features())


def pairs_within(settings: "Settings") -> "PairsWithin":
    """Return what the partners of an engine must have, too, by its slice (None: nothing), as a
    feature wants it.
    """
    wanted = next(
        (each for feature in features() if (each := feature.pairs_within(settings)) is not None),
        None,
    )
    return wanted or (lambda _slice: None)


@lru_cache(1)
def feature_settings() -> Sequence[type[object]]:
    """Return the classes of the settings of features."""
    return [cast("type[object]", module.SETTINGS) for module in _modules("settings")]


@lru_cache(1)
def feature_policies() -> Sequence[str]:
    """Return the names of routing policies of features: each chooses both engines, by what they
    have cached.
    """
    return [
        name
        for module in _modules("settings")
        for name in cast("tuple[str, ...]", getattr(module, "POLICIES", ()))
    ]


def feature_commands() -> Mapping[str, tuple[str, str]]:
    """Return the subcommands of features by name: the module, which is not imported, and what it
    does.
    """
    found = dict[str, tuple[str, str]]()
    for name in FEATURES:
        place = f"{__name__}.{name}"
        if find_spec(f"{place}.command"):
            found[name] = f"{place}.command", cast("str", import_module(place).COMMAND)
    return found


def _modules(part: str) -> Sequence[ModuleType]:
    places = [f"{__name__}.{name}.{part}" for name in FEATURES]
    return [import_module(place) for place in places if find_spec(place)]
