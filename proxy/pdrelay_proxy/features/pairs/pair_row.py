"""What pages and commands show of a pair of engines.

It is not compiled: msgspec writes it as JSON.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairRow:
    """A prefill engine, and a decode engine that has got KV from it, or should have.

    Times are seconds.
    """

    prefill: str
    decode: str
    handovers: int  # requests that both have served
    failed: int  # decode legs that failed behind a good prefill leg
    failures: dict[str, int]  # the same by how they failed
    # of streams, from handing over to the first event: a moving mean; None: there was none
    ttft_s: float | None
    # of its latest transfers of KV, as our connector shows; None: not known
    bytes_per_s: float | None
    last_s: float | None  # since it was last used; None: not lately
    # well, failing, resting, trying; of a pair that does not fail the state of an engine that is
    # not well
    state: str
    reason: str | None  # of its latest failure, if it fails; or why that engine is not well
    # of its latest failure, in the words of the decode engine's connector; None: it does not say
    why: str | None
    failed_in_a_row: int  # transfers, as the decode engine shows them
    # pull, push, or both while they are compared; None: the engines leave no choice
    mode: str | None
    # of the streams of the comparison, from handing over to the first event: their mean
    pull_s: float | None
    push_s: float | None  # the same of those that were pushed
    rest_s: float | None  # how long it rests yet; None: it does not
