"""The endpoint plugin of ``GET /v1/pdrelay/requests/NAME``, the events of a request (docs/why.md).

It runs in each API server process, and loads only if ``VLLM_PLUGINS`` names it. vLLM's middleware
requires the API key, because the path begins with /v1. An answer has names, times and numbers of
tokens and blocks, but no prompt.
"""

from argparse import Namespace
from typing import Any, Final

from fastapi import FastAPI, Path
from starlette.datastructures import State
from starlette.responses import JSONResponse, Response

from pdrelay_connector.core.timeline import TimelineEvent
from pdrelay_connector.shell.timeline_notes import PLUGIN
from pdrelay_connector.shell.vllm_stats import TIMELINES

PATH: Final = "/v1/pdrelay/requests/{name}"


class TimelinesPlugin:
    """vLLM's ``EndpointPlugin`` (``vllm/plugins/endpoint_plugins/interface.py``)."""

    name = PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the route."""
        app.add_api_route(PATH, show_timeline, methods=["GET"], response_model=None)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Do nothing: the events come with the engine's statistics."""


async def show_timeline(
    name: str = Path(min_length=20, max_length=128, pattern=r"^[!-~]+$"),
) -> Response:
    """Return the events of the requests with this name; none is an empty list."""
    requests = [
        {"id": key, "events": [_shown(*event) for event in events]}
        for key, events in TIMELINES.find(name).items()
    ]
    return JSONResponse({"requests": requests}, headers={"cache-control": "no-store"})


def _shown(engine: int, event: TimelineEvent) -> dict[str, object]:
    return {
        "step": event.step.value,
        "at": event.at,
        "count": event.count,
        "rank": engine,
        "note": event.note,
    }
