"""Declares settings: type and kind, and their texts in help, documents and the chart.

``settings.py`` declares the router's own, and each folder of ``features`` may declare its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeVar

_T = TypeVar("_T")
ENDLESS: Final = 1 << 62  # above every sensible number, and below infinity


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of value, as it is written in the file and as an argument."""

    # the end of an error: "'soon' is not a time: write a number of seconds above 0"
    right: str
    metavar: str  # for a string without ``check``: the name of its check in setting_values.py
    value_type: type = str  # in TOML, where a float may be written as a whole number
    least: float = -ENDLESS
    above: float | None = None  # every value must be greater
    most: float = ENDLESS
    choices: tuple[str, ...] = ()
    is_open: bool = False  # there may be more: setting_values.py checks them by the metavar
    unit: str = ""
    # of a string: returns the value; None, or ValueError with a sentence, if it is not right
    check: Callable[[str], str | None] | None = None


@dataclass(frozen=True, slots=True)
class ReusedKv:
    """What ``reuse_kv`` does to a setting of a feature, with a policy that uses caches."""

    value: object  # the value that it gets, unless it is set
    unused: str  # the log's text about a router with its default


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of a setting, beside its name, type and default."""

    group: "Group"
    help: str  # the meaning
    unset: str = "none"  # the meaning of no value
    # takes effect on SIGHUP; other settings need a restart
    live: bool = False
    chart: str = ""  # the chart's value that sets it; empty: router.settings
    environment: str = ""  # the variable of a secret, which is neither flag nor key
    # a variable that other programs read, too; flag and file take precedence
    variable: str = ""
    reused: ReusedKv | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """A part of ``--help`` and of docs/options.md."""

    title: str

    def option(
        self,
        default: _T,
        help: str,
        *,
        unset: str = "none",
        live: bool = False,
        chart: str = "",
        variable: str = "",
        reused: ReusedKv | None = None,
    ) -> _T:
        """Declare a field of Settings, or of the settings of a feature."""
        declared = Option(self, help, unset, live, chart, variable=variable, reused=reused)
        return field(default=default, metadata={"option": declared})

    def secret(self, environment: str, help: str, *, unset: str, chart: str = "") -> str | None:
        """Declare a secret, which the environment alone may have: ps shows flags."""
        option = Option(self, help, unset, chart=chart, environment=environment)
        return field(default=None, repr=False, metadata={"option": option})


Switch = Annotated[
    bool, Kind("a switch: write true or false", "{true,false}", bool, choices=("true", "false"))
]
File = Annotated[str, Kind("", "FILE")]
Address = Annotated[str, Kind("", "ENGINE")]
Network = Annotated[str, Kind("", "NETWORK")]
Origin = Annotated[
    str, Kind("an origin: write https://host or https://host:port, or * for all", "ORIGIN")
]
HeaderName = Annotated[
    str, Kind("the name of a header: write such as X-Correlation-Id", "HEADER_NAME")
]
Host = Annotated[
    str, Kind("the name of a host: write it without scheme and port, or * for all", "HOST")
]
DnsName = Annotated[
    str,
    Kind("a DNS name: write it without scheme, port and *, such as engines.llm.svc", "DNS_NAME"),
]
Url = Annotated[str, Kind("a URL: write http://host:port or https://host:port", "URL")]
SessionName = Annotated[
    str,
    Kind(
        "a name: write a header, or body:FIELD or body:FIELD.FIELD for a field of the body",
        "HEADER",
    ),
]
Port = Annotated[int, Kind("a port: write a number from 0 to 65535", "PORT", int, 0, most=65535)]
Bytes = Annotated[
    int, Kind("a size: write a whole number of bytes, 1 or more", "BYTES", int, 1, unit="B")
]
SomeBytes = Annotated[
    int, Kind("a size: write a whole number of bytes, 0 or more", "BYTES", int, 0, unit="B")
]
Count = Annotated[int, Kind("a count: write a whole number, 1 or more", "N", int, 1)]
Natural = Annotated[int, Kind("a count: write a whole number, 0 or more", "N", int, 0)]
Processes = Annotated[
    int, Kind("a number of workers: write one from 1 to 64", "N", int, 1, most=64)
]
Retries = Annotated[int, Kind("a number of retries: write one from 0 to 10", "N", int, 0, most=10)]
Seconds = Annotated[
    float, Kind("a time: write a number of seconds above 0", "SECONDS", float, above=0, unit="s")
]
SomeSeconds = Annotated[
    float, Kind("a time: write a number of seconds, 0 or more", "SECONDS", float, 0, unit="s")
]
WholeSeconds = Annotated[
    int,
    Kind(
        "a time: write a whole number of seconds, 1 or more",
        "SECONDS",
        int,
        1,
        most=1 << 31,
        unit="s",
    ),
]
Ratio = Annotated[
    float, Kind("a share: write a number above 0, at most 1", "RATIO", float, above=0, most=1)
]
Rate = Annotated[
    float,
    Kind("a rate: write a number of requests a second, above 0", "N", float, above=0, unit="/s"),
]
