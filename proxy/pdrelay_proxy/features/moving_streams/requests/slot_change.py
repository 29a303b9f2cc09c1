"""Another decode engine takes the place of one that is left while a prompt is computed."""

from collections.abc import Collection
from typing import Final, TypeAlias

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.errors import ProxyError
from pdrelay_proxy.requests.attempt import Attempt

_DECODE: Final = Role.DECODE
# By the engine that is left, the prefill engine that fits others or not, the model and the rank
# that the client wants, and the engines that failed before.
StuckPrompt: TypeAlias = tuple[
    InstanceId, InstanceId, str | None, int | None, frozenset[InstanceId]
]


def change_slot(attempt: Attempt, leaving: Collection[InstanceId], stuck: set[StuckPrompt]) -> None:
    """Hold the slot at another decode engine, if its engine is left and another can take its place.

    ``stuck``: prompts like these were tried a moment ago, and no engine could.
    """
    slot = attempt.slot
    prefill = attempt.prefill
    if slot is None or prefill is None or slot.id not in leaving:
        return
    hints = attempt.plan.hints
    avoided = attempt.retries.avoided
    kind = slot.id, prefill.id, hints.model, hints.rank, frozenset(avoided)
    if kind in stuck:
        return
    fleet = attempt.fleet
    fitting = fleet.registry.fitting(prefill, attempt.usable(_DECODE), hints.model)
    others = fleet.nearest(prefill, [engine for engine in fitting if engine.id not in avoided])
    try:
        other = attempt.choose_decode(others) if others else None
    except ProxyError:  # none of them serves the model, or is the rank that the client wants
        other = None
    if other is None:
        stuck.add(kind)
        return
    attempt.leave_slot()
    attempt.hold_slot(other)
    attempt.expected = None
    fleet.took_over(prefill, other, hints)
