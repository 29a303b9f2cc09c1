"""The settings of traces and timelines."""

from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.declarations import Url
from pdrelay_proxy.settings import TELEMETRY


@dataclass(frozen=True, slots=True)
class WhySettings:
    """The choices."""

    # fmt: off
    otlp_endpoint: Url | None = TELEMETRY.option(None,
        "base URL of the collector that gets the spans (OTLP over HTTP)", unset="OTEL_EXPORTER_OTLP_ENDPOINT",
        variable="OTEL_EXPORTER_OTLP_ENDPOINT")
    # fmt: on

    # No option: only tests change it.
    request_history: int = 1000  # finished requests whose timeline can still be shown


SETTINGS: Final = WhySettings
