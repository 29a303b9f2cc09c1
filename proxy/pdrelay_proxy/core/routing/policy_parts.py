"""What a policy is made of: the interface for policies of other packages (docs/routing.md)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdrelay_proxy.core.model import Instance, RoutingHints


class PromptMatches(Protocol):
    """What engines have in their caches, now, as far as is known."""

    def matched(self, instance: Instance, hints: RoutingHints, /, *, is_there: bool = False) -> int:
        """Return how many bytes of the prompt it has; ``is_there``: none that are on their way."""
        ...

    def matches(
        self, among: Sequence[Instance], hints: RoutingHints, /, *, is_there: bool = False
    ) -> Sequence[int]:
        """Return the same for each of some engines, in less time."""
        ...

    def sent(self, instance: Instance, hints: RoutingHints, /) -> None:
        """The request goes to an engine, which will have its prompt: call it with each choice, or
        matches stay 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """What the router gives to a policy that it builds."""

    # higher the busier an engine is: its requests, and a prefill engine's report
    load: Callable[[Instance], float]
    dice: Callable[[int], int]  # dice(n): a random number from 0 to n-1
    turn: int  # where to begin, so that several routers do not all begin with the same engine
    caches: PromptMatches
    # The share of an engine's KV cache in use, from 0 to 1, as it showed last: a decode engine in
    # its metrics (engine_metrics_interval_s), a prefill engine with its answers. None: not known,
    # or a minute old.
    kv_usage: Callable[[Instance], float | None] = lambda _: None
