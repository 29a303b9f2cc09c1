"""Another decode engine takes the place of one that is left while a prompt is computed."""

from collections.abc import Collection
from typing import Final, TypeAlias

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.errors import ProxyError
from pdrelay_proxy.requests.engine_choice import EngineChoice

_DECODE: Final = Role.DECODE
# By the engine that is left, the prefill engine that fits others or not, the model and the rank
# that the client wants, and the engines that failed before.
StuckPrompt: TypeAlias = tuple[
    InstanceId, InstanceId, str | None, int | None, frozenset[InstanceId]
]


def change_slot(
    choice: EngineChoice, leaving: Collection[InstanceId], stuck: set[StuckPrompt]
) -> None:
    """Hold the slot at another decode engine, if its engine is left and another can take its place.

    ``stuck``: prompts like these were tried a moment ago, and no engine could.
    """
    slot = choice.slot
    prefill = choice.prefill
    if slot is None or prefill is None or slot.id not in leaving:
        return
    hints = choice.plan.hints
    avoided = choice.retries.avoided
    kind = slot.id, prefill.id, hints.model, hints.rank, frozenset(avoided)
    if kind in stuck:
        return
    fleet = choice.fleet
    fitting = fleet.registry.fitting(prefill, choice.usable(_DECODE), hints.model)
    others = fleet.nearest(prefill, [engine for engine in fitting if engine.id not in avoided])
    try:
        other = choice.choose_decode(others) if others else None
    except ProxyError:  # none of them serves the model, or is the rank that the client wants
        other = None
    if other is None:
        stuck.add(kind)
        return
    choice.leave_slot()
    choice.hold_slot(other)
    choice.expected = None
    fleet.took_over(prefill, other, hints)
