"""The metrics of the measured speeds."""

from collections.abc import Callable, Iterator
from typing import Final

from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.features.expected_ttft.core.engine_speed import EngineSpeed, EngineSpeeds
from pdrelay_proxy.io.metric_families import SERIES_AT_ONCE, Family, gauge_family, parts_of


def speed_families(registry: Registry, speeds: EngineSpeeds) -> Iterator[Family]:
    """Yield the metrics; they are empty without the policy, and without a bound for pauses."""
    members = registry.members()
    for name, text, value in _SPEEDS:
        for some in parts_of(members, SERIES_AT_ONCE):
            shown = [
                (member.instance.id, value(speed))
                for member in some
                if (speed := speeds.find(member))
            ]
            yield gauge_family(
                name,
                text,
                ("instance",),
                [((engine,), number) for engine, number in shown if number is not None],
            )


def _rate(speed: EngineSpeed) -> float | None:
    return None if speed.prefill.line is None else 1.0 / speed.prefill.line.slope_s


def _queued(speed: EngineSpeed) -> float | None:
    return (
        speed.computing.tokens if speed.prefill.line is not None or speed.computing.tokens else None
    )


def _step(speed: EngineSpeed) -> float | None:
    return None if speed.step.line is None else speed.step.line.at(len(speed.running))


_SPEEDS: Final[tuple[tuple[str, str, Callable[[EngineSpeed], float | None]], ...]] = (
    (
        "pdrelay_instance_prefill_tokens_per_second",
        "Tokens of prompts that an engine computes in a second, as its legs show.",
        _rate,
    ),
    (
        "pdrelay_instance_queued_tokens",
        "Tokens of prompts that this router waits for an engine to compute.",
        _queued,
    ),
    (
        "pdrelay_instance_inter_token_latency_seconds",
        "Seconds between two tokens of a stream of an engine, with the streams that it has now, as "
        "its streams show.",
        _step,
    ),
)
