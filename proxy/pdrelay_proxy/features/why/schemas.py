"""The answers of ``GET /requests/NAME``."""

from pydantic import BaseModel, Field


class TimelineRow(BaseModel):
    """A stretch of time of a request, in milliseconds since its head came to the router."""

    what: str = Field(examples=["prefill leg"])
    where: str = Field(description="router, or the engine's id", examples=["prefill-0"])
    leg: str = Field(
        description=(
            "the leg that it is a part of, by its engine; empty: these rows follow each other"
        )
    )
    begin_ms: float
    duration_ms: float
    note: str


class RequestTimeline(BaseModel):
    """What happened to one request."""

    request_id: str
    client_id: str | None
    path: str
    state: str
    status: int | None = Field(description="null: it is under way")
    outcome: str | None
    mode: str
    single_reason: str | None
    began_at: float = Field(description="seconds since the epoch")
    duration_ms: float = Field(description="of a request that is under way: so far")
    retries: list[str]
    moves: list[str] = Field(description="engines whose streams were cut, and what became of it")
    error: str | None
    rows: list[TimelineRow]
    notes: list[str] = Field(description="what is missing, and why")


class RequestTimelines(BaseModel):
    """The requests with a name, those under way first, then the latest first."""

    requests: list[RequestTimeline]
    omitted: int = Field(description="how many more there are")
