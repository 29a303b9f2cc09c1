"""``GET /requests/NAME``: what happened to a request, for operators (docs/why.md)."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final

from fastapi import APIRouter, HTTPException, Path, Query

from pdrelay_proxy.api.operator_route import (
    OPERATOR_KEY,
    OPERATORS,
    OperatorAccess,
    operator_errors,
)
from pdrelay_proxy.core.milliseconds import written_ms
from pdrelay_proxy.core.request_record import (
    CLIENT_CLOSED_REQUEST,
    PromptParts,
    PromptRecord,
    RequestRecord,
)
from pdrelay_proxy.features.why.engine_timelines import Timelines
from pdrelay_proxy.features.why.request_history import RequestHistory, name_begins, records_named
from pdrelay_proxy.features.why.schemas import RequestTimeline, RequestTimelines, TimelineRow
from pdrelay_proxy.requests.lifecycle import RequestState

_CUT: Final = "..."  # the status page shows half of an id with this suffix
_MOST: Final = 8  # requests of one name that are shown; each queries up to four engines
UnderWay = Callable[[], Iterable[tuple[RequestRecord, RequestState]]]


def request_routes(
    history: Callable[[], RequestHistory],
    under_way: UnderWay,
    timelines: Timelines,
    access: OperatorAccess,
) -> APIRouter:
    """Return the route, which requires an operator's key."""
    router = APIRouter(
        prefix="/requests",
        tags=[OPERATORS],
        dependencies=[OPERATOR_KEY],
        route_class=access.route(),
    )

    @router.get("/{name:path}", responses=operator_errors(400))
    async def show(
        name: Annotated[str, Path(min_length=1, max_length=128, pattern=r"^[!-~]+$")],
        *,
        engines: Annotated[
            bool, Query(description="ask its engines, too; one that hangs is waited for")
        ] = True,
    ) -> RequestTimelines:
        """Say what happened to the requests with a name: that of a response's X-Request-Id, or the
        client's own.

        The beginning of a name is enough where no other request has one that begins so.
        """
        matches = [
            (named, _state(named, state))
            for record, state in under_way()
            for named in records_named(record, name)
        ]
        matches += [(record, RequestState.OVER) for record in history().find(name)]
        if not matches:
            beginning = name.removesuffix(_CUT)
            matches = [
                (record, state) for record, state in under_way() if name_begins(record, beginning)
            ]
            matches += [
                (record, RequestState.OVER) for record in history().find_beginning(beginning)
            ]
            _check_unique(beginning, [record for record, _ in matches])
        if not matches:
            kept_count = len(history())
            raise HTTPException(
                404,
                f"There is no request {name!r} among those under way and the last {kept_count} that are "
                f"over",
            )
        # together: an engine that hangs is waited for once
        shown = await asyncio.gather(
            *[
                _shown(record, state, timelines, asks_engines=engines)
                for record, state in matches[:_MOST]
            ]
        )
        return RequestTimelines(requests=shown, omitted=len(matches) - len(shown))

    return router


def _check_unique(beginning: str, records: Sequence[RequestRecord]) -> None:
    """Raise HTTPException if several requests have a name with this beginning."""
    if len(records) > 1:
        raise HTTPException(
            400,
            f"{len(records)} requests have an id that begins with {beginning!r}: write more of it",
        )


def _state(record: RequestRecord, state: RequestState) -> RequestState:
    """Return the state of a record; ``state``: of its request, which may outlast a prompt's."""
    return RequestState.OVER if isinstance(record, PromptRecord) else state


def _notes_of_parts(parts: PromptParts) -> Iterable[str]:
    """Yield notes about the prompts of a request, with the names of the notable ones."""
    failed = f", {parts.failed} of them failed" if parts.failed else ""
    yield f"{parts.count} prompts are over{failed}; each has its own legs, and these are kept:"
    for part in parts.notable:
        engines = [leg.instance for leg in (part.prefill, part.decode) if leg is not None]
        status = (
            ""
            if part.status < 400
            else " left"
            if part.status == CLIENT_CLOSED_REQUEST
            else f" {part.status}"
        )
        yield f"{part.request_id}{status} {written_ms(part.duration_s * 1000)} ms {' '.join(engines)}".rstrip()


async def _shown(
    record: RequestRecord, state: RequestState, timelines: Timelines, *, asks_engines: bool
) -> RequestTimeline:
    is_over = state is RequestState.OVER
    began_at, timeline = await timelines.for_request(
        record, is_over=is_over, asks_engines=asks_engines
    )
    return RequestTimeline(
        request_id=record.request_id,
        client_id=record.client_id,
        path=record.path,
        state=state,
        status=record.status if is_over else None,
        outcome=record.outcome if is_over else None,
        mode=record.mode,
        single_reason=record.single_reason,
        began_at=began_at,
        duration_ms=round(timeline.total_ms, 3),
        retries=[str(retry) for retry in record.retries],
        moves=[str(move) for move in record.moves],
        error=record.error or record.prefill_error,
        rows=[
            TimelineRow(
                what=row.what,
                where=row.where,
                leg=row.leg,
                begin_ms=round(row.begin_ms, 3),
                duration_ms=round(row.duration_ms, 3),
                note=row.note,
            )
            for row in timeline.rows
        ],
        notes=[*timeline.notes, *(() if record.parts is None else _notes_of_parts(record.parts))],
    )
