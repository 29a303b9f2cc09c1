"""What the matrix knows of a program of others, and of a kind of engines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdrelay_tools.local.processes import Command
from pdrelay_tools.local.recipe import EngineSpec

Causes = Mapping[str, str]  # property -> why it does not hold: a sentence for the page


@dataclass(frozen=True, slots=True)
class Pair:
    """The two engines that a program is put before, and a free port or two for it."""

    prefill: EngineSpec
    decode: EngineSpec
    ports: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Peer:
    """A router of others, before two engines with our connector."""

    name: str  # as PEERS=... names it
    title: str  # in the table
    version: str
    argv: Callable[[Pair], list[object]]  # builds its environment, too
    health: str = "/health"
    causes: Causes = field(default_factory=dict[str, str])
    connector: Mapping[str, object] = field(default_factory=dict[str, object])  # beside the defaults of our connector
    config: Callable[[EngineSpec], dict[str, object]] | None = None  # a --kv-transfer-config in place of ours
    engine: Callable[[EngineSpec], Command] | None = None  # how it starts engines itself; None: they are `vllm serve`
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Engines:
    """A kind of engines of others, behind our router."""

    name: str
    title: str
    config: Callable[[EngineSpec], dict[str, object]]  # its --kv-transfer-config
    vllm: str | None = None  # the version, if it is not the one that is installed
    loads: str | None = None  # our connector counts loads; None: vLLM counts tokens by their source
    causes: Causes = field(default_factory=dict[str, str])
