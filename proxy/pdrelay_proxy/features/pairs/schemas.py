"""The answer of ``GET /pairs``."""

from typing import Literal

from pydantic import BaseModel, Field

from pdrelay_proxy.core.fleet.health import HealthState


class PairOfEngines(BaseModel):
    """A prefill engine, and a decode engine that has got KV from it, or should have; by this
    router's requests.
    """

    prefill: str
    decode: str
    handovers: int = Field(description="requests that both have served")
    failed: int = Field(description="decode legs that failed behind a good prefill leg")
    failures: dict[str, int] = Field(description="the same by how they failed")
    ttft_s: float | None = Field(
        description="from handing over to the first event of streams: a moving mean"
    )
    bytes_per_s: float | None = Field(
        description="of its latest transfers of KV, as our connector shows; null: not known"
    )
    last_s: float | None = Field(description="seconds since it was last used; null: not lately")
    state: Literal["well", "failing", "resting", "trying"] | HealthState = Field(
        description="of a pair that does not fail that of an engine that is not well"
    )
    reason: str | None = Field(
        description=(
            "of its latest failure, in the words of pdrelay_pair_failures_total; or which engine "
            "is not well"
        )
    )
    why: str | None = Field(
        description="the same in the words of the decode engine's connector; null: it does not say"
    )
    failed_in_a_row: int = Field(description="transfers, as the decode engine shows them")
    mode: Literal["pull", "push", "both"] | None = Field(
        description="both: they are compared; null: the engines leave no choice"
    )
    pull_s: float | None = Field(
        description="of the streams of the comparison, from handing over to the first event"
    )
    push_s: float | None = Field(description="the same of those that were pushed")
    rest_s: float | None = Field(description="how long it rests yet; null: it does not")


class PairList(BaseModel):
    """Pairs that fail, and those that were used lately, the latest first."""

    known: int = Field(description="pairs that were used and are remembered")
    dropped: int = Field(description="pairs that were forgotten to make room")
    resting: int
    unkept: int = Field(description="failing pairs that do not rest, because too many do")
    pairs: list[PairOfEngines]
