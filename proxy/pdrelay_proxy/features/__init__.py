"""What a router does beyond serving requests. Each feature is a folder; without its folder and its line, it is gone.

A folder may have ``feature.py``, with a ``Feature`` named FEATURE; ``settings.py``, with a class of declared settings
named SETTINGS; and ``command.py``, a subcommand of ``pdrelay``, with HELP. Nothing outside of a folder imports it.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from pdrelay_proxy.features.feature import Feature

FEATURES: Final = ("roles",)


@lru_cache(1)
def features() -> "Sequence[Feature]":
    """Return all features; they import what the router consists of."""
    return [cast("Feature", module.FEATURE) for module in _modules("feature").values()]


@lru_cache(1)
def feature_settings() -> Sequence[type[object]]:
    """Return the classes of the settings of features."""
    return [cast("type[object]", module.SETTINGS) for module in _modules("settings").values()]


def feature_commands() -> Mapping[str, str]:
    """Return the modules of the subcommands of features, by name, without importing them."""
    return {name: place for name in FEATURES if find_spec(place := f"{__name__}.{name}.command")}


def _modules(part: str) -> Mapping[str, ModuleType]:
    places = {name: f"{__name__}.{name}.{part}" for name in FEATURES}
    return {name: import_module(place) for name, place in places.items() if find_spec(place)}
