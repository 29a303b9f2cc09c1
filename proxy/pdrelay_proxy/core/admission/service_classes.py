"""Classes of requests: the targets that each has, how important it is, and which of them a client may name.

A class is written as ``interactive:ttft=0.5,itl=0.05,on_miss=refuse``, or as a table of the settings file.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Final, Self

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.errors import BadRequest, ClassNotAllowed, ConfigError

CLASS_KEYS: Final = ("ttft", "itl", "on_miss", "max_wait", "rank", "open")
MOST_CLASSES: Final = 16  # each is a label of metrics
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_NUMBER: Final = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?(e-[0-9]{1,2})?")
_RANKS: Final = 99  # the last one
_SECONDS_MOST: Final = 86_400.0
_SHOWN: Final = 40  # characters of a wrong value that an error repeats


class OnMiss(FastStrEnum):
    """What becomes of a request that would miss its target, or have one of a more important class miss its own."""

    QUEUE = "queue"  # it waits
    REFUSE = "refuse"  # it is refused at once
    SERVE = "serve"  # it is served all the same


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """One class; None: it has no such target, or waits as long as ``max_queue_wait_s`` says."""

    name: str
    rank: int = 0  # lower is more important
    ttft_s: float | None = None  # from the arrival of a request to its first token
    itl_s: float | None = None  # mean time between two tokens of a stream
    on_miss: OnMiss = OnMiss.QUEUE
    max_wait_s: float | None = None
    is_open: bool = False  # any client may name it
    number: int = 0  # its place among the classes

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one; raises ValueError: the sentence names the class, the key and the value, and what would be right."""
        name, colon, said = text.partition(":")
        words = [word.partition("=") for word in said.split(",")] if said else []
        if len({key for key, _, _ in words}) < len(words):
            raise ValueError(f"the class {_shown(name)} has a key twice")
        if (colon and not said) or any(not equals for _, equals, _ in words):
            raise ValueError(f"{_shown(text)} is not a class: write NAME:ttft=SECONDS,on_miss=queue")
        return cls.of(name, {key: value for key, _, value in words})

    @classmethod
    def of(cls, name: str, said: Mapping[str, str]) -> Self:
        """Read one of its keys; raises ValueError as ``parse`` does."""
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{_shown(name)} is not the name of a class: write at most 32 lower-case letters, digits, '-' and '_'"
            )
        for key in said:
            if key not in CLASS_KEYS:
                close = get_close_matches(key, CLASS_KEYS, n=1, cutoff=0.5)
                right = f"did you mean {close[0]}?" if close else f"write {_listed(CLASS_KEYS)}"
                raise ValueError(f"the class {name} has {_shown(key)}, which is not a key of a class: {right}")
        max_wait = said.get("max_wait")
        return cls(
            name,
            _rank(name, said.get("rank", "0")),
            _seconds(name, "ttft", said["ttft"]) if "ttft" in said else None,
            _seconds(name, "itl", said["itl"]) if "itl" in said else None,
            _on_miss(name, said.get("on_miss", OnMiss.QUEUE)),
            None if max_wait is None else _seconds(name, "max_wait", max_wait),
            _switch(name, said.get("open", "false")),
        )


@dataclass(frozen=True, slots=True)
class ServiceClasses:
    """All classes of a router, of which there is at least one."""

    by_name: Mapping[str, ServiceClass]
    default: ServiceClass  # of a request whose key has none, and which names none

    @classmethod
    def of(cls, texts: Iterable[str], default: str | None) -> Self | None:
        """Read the classes of the settings; None: there are none. Raises ConfigError."""
        found = dict[str, ServiceClass]()
        for text in texts:
            try:
                one = ServiceClass.parse(text)
            except ValueError as exc:
                raise ConfigError(f"classes: {exc}") from exc
            if one.name in found:
                raise ConfigError(f"classes: {one.name} is there twice: write each class once")
            found[one.name] = replace(one, number=len(found))
        if len(found) > MOST_CLASSES:
            raise ConfigError(f"classes: there are {len(found)}, and {MOST_CLASSES} is the most that a router may have")
        if not found:
            if default is not None:
                raise ConfigError(f"default_class is {_shown(default)}, and there are no classes: write classes, too")
            return None
        if default is None:
            raise ConfigError(
                f"there are classes, and default_class is missing, the class of requests that name none: "
                f"write {_listed(found)}"
            )
        if default not in found:
            raise ConfigError(f"default_class is {_shown(default)}, which is not a class: write {_listed(found)}")
        return cls(found, found[default])

    @property
    def names(self) -> Sequence[str]:
        """List the names."""
        return tuple(self.by_name)

    def check_granted(self, granted: Mapping[str, Sequence[str]], source: str) -> None:
        """Accept what the file of keys grants; raises ConfigError: it names a class that is none."""
        for owner, names in granted.items():
            for name in names:
                if name not in self.by_name:
                    raise ConfigError(
                        f"{source} gives {owner} the class {name}, which is not a class: write {_listed(self.by_name)}"
                    )

    def of_request(self, granted: Sequence[str], asked: Sequence[bytes]) -> ServiceClass:
        """Return the class of a request whose key was granted these, and whose headers ask for these.

        Raises:
            BadRequest: several are asked for.
            ClassNotAllowed: the client may not use the one that it asks for, or there is no such class.
        """
        own = self.by_name.get(granted[0], self.default) if granted else self.default
        if not asked:
            return own
        if len(asked) > 1:
            raise BadRequest(f"X-Request-Class is there {len(asked)} times: send one")
        name = asked[0].decode("latin-1").strip(" \t")
        found = self.by_name.get(name)
        if found is not None and (found is own or found.is_open or name in granted):
            return found
        usable = {own.name, *granted, *(one.name for one in self.by_name.values() if one.is_open)}
        may = _listed([one for one in self.by_name if one in usable])
        shown = name if _NAME.fullmatch(name) else "of its X-Request-Class"
        raise ClassNotAllowed(f"this client may not use the class {shown}: it may use {may}")


def check_no_classes(granted: Mapping[str, Sequence[str]], source: str) -> None:
    """Accept a file of keys where there are no classes; raises ConfigError: it grants some."""
    for owner, names in granted.items():
        if names:
            raise ConfigError(f"{source} gives {owner} the class {names[0]}, and the settings have no classes")


def _rank(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 2:
        return int(text)
    raise ValueError(f"the class {name} has the rank {_shown(text)}: write a whole number from 0 to {_RANKS}")


def _seconds(name: str, key: str, text: str) -> float:
    seconds = float(text) if _NUMBER.fullmatch(text) else 0.0
    if 0.0 < seconds <= _SECONDS_MOST:
        return seconds
    raise ValueError(
        f"the class {name} has {key} {_shown(text)}: write a number of seconds above 0, at most {_SECONDS_MOST:.0f}"
    )


def _on_miss(name: str, text: str) -> OnMiss:
    for one in OnMiss:
        if text == one:
            return one
    raise ValueError(f"the class {name} has on_miss {_shown(text)}: write queue, refuse or serve")


def _switch(name: str, text: str) -> bool:
    if text in ("true", "false"):
        return text == "true"
    raise ValueError(f"the class {name} has open {_shown(text)}: write true or false")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
