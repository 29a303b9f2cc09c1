"""All settings of this router: its own and those of its features, by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final, cast, get_args

from pdrelay_proxy.declarations import Kind, Option, Switch
from pdrelay_proxy.features import feature_policies, feature_settings
from pdrelay_proxy.settings import PolicyName, Settings, policy_kind

_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"))


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of Settings, or of a feature's settings."""

    owner: type[object]
    name: str
    default: object
    kind: Kind
    option: Option

    @property
    def flag(self) -> str:
        """Its argument."""
        return "--" + self.name.removesuffix("_s").replace("_", "-")

    def value(self, settings: Settings) -> object:
        """Return its value in a router's settings."""
        setting_value: object = getattr(
            settings if self.owner is Settings else settings.for_feature(self.owner), self.name
        )
        return setting_value

    @property
    def is_list(self) -> bool:
        """Whether it may have several values."""
        return isinstance(self.default, tuple)

    @property
    def default_text(self) -> str:
        """Its default as people write it, with the unit."""
        if self.default is None or self.is_list:
            return self.option.unset
        if not isinstance(self.default, int | float) or isinstance(self.default, bool):
            return str(self.default).lower()
        for size, unit in _SIZES if self.kind.unit == "B" else ():
            if self.default >= size:
                return f"{self.default / size:g} {unit}"
        number = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return f"{number} {self.kind.unit}".rstrip()


def needs_restart(old: Settings, new: Settings) -> list[str]:
    """Return the names of differing settings that take effect only at a restart."""
    fixed = [name for name, setting in OPTIONS.items() if not setting.option.live]
    return [name for name in fixed if OPTIONS[name].value(old) != OPTIONS[name].value(new)]


def without_restart(old: Settings, new: Settings) -> tuple[Settings, Sequence[str]]:
    """Return the new settings as far as a running router can apply them, and the names of those
    that need a restart.
    """
    fixed = needs_restart(old, new)
    return with_values(new, {name: OPTIONS[name].value(old) for name in fixed}), fixed


def with_values(settings: Settings, values: Mapping[str, object]) -> Settings:
    """Return settings with other values, by the names of settings."""
    by_owner: dict[type[object], dict[str, Any]] = {}
    for name, value in values.items():
        by_owner.setdefault(_BY_NAME[name].owner, {})[name] = value
    changed = replace(settings, **by_owner.pop(Settings, {}))
    chosen = [
        replace(cast("Any", changed.for_feature(owner)), **new_values)
        for owner, new_values in by_owner.items()
    ]
    return changed.with_features(*chosen) if chosen else changed


def reused_of_features() -> Mapping[str, object]:
    """Return the values that ``reuse_kv`` gives to settings of features."""
    return {
        name: setting.option.reused.value
        for name, setting in OPTIONS.items()
        if setting.option.reused is not None
    }


def unused_of_features(settings: Settings) -> Sequence[str]:
    """Return sentences about those with their defaults: the KV that a router does not use."""
    return [
        f"{setting.option.reused.unused} ({name})"
        for name, setting in OPTIONS.items()
        if setting.option.reused is not None and setting.value(settings) == setting.default
    ]


def _kind(annotation: Any) -> Kind:  # noqa: ANN401 (types of types have no type)
    """Return the kind of a field: its annotation (Annotated), a switch, a choice or a string."""
    for part in (annotation, *get_args(annotation)):
        if metadata := getattr(part, "__metadata__", ()):
            kind = cast("Kind", metadata[0])
            return (
                policy_kind((*PolicyName, *feature_policies()))
                if kind.metavar == "POLICY"
                else kind
            )
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        *others, last = annotation
        right = f"a choice: write {', '.join(others)} or {last}"
        return Kind(right, "{" + ",".join(annotation) + "}", annotation, choices=tuple(annotation))
    return _kind(Switch) if annotation is bool else Kind("", "NAME")


def _declared(owner: Any) -> Sequence[Setting]:  # noqa: ANN401 (dataclasses have no type of their own)
    return [
        Setting(owner, f.name, f.default, _kind(f.type), f.metadata["option"])
        for f in fields(owner)
        if f.metadata
    ]


def _grouped(declared: Sequence[Setting]) -> Sequence[Setting]:
    """Sort settings so that those of a group follow each other, whatever declares them."""
    groups = [*dict.fromkeys([setting.option.group for setting in declared])]
    return sorted(declared, key=lambda setting: groups.index(setting.option.group))


DECLARED: Final = _grouped(
    [setting for owner in (Settings, *feature_settings()) for setting in _declared(owner)]
)
_BY_NAME: Final[Mapping[str, Setting]] = {setting.name: setting for setting in DECLARED}
OPTIONS: Final[Mapping[str, Setting]] = {
    setting.name: setting for setting in DECLARED if not setting.option.environment
}
SECRETS: Final[Mapping[str, Setting]] = {
    setting.name: setting for setting in DECLARED if setting.option.environment
}
