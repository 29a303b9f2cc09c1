"""What a decode engine computes alone now."""

from pdrelay_proxy.core.fleet.lone_prompts import COUNTED_S, LonePrompts
from pdrelay_proxy.core.model import RequestId

A, B = RequestId("a"), RequestId("b")


def test_a_prompt_counts_until_its_first_token():
    """Once, however often it is sent."""
    lone = LonePrompts()
    lone.enter(A, 300, 0.0)
    lone.enter(B, 200, 0.1)
    lone.enter(A, 400, 0.2)
    assert lone.size(0.3) == 600

    lone.leave(A)
    lone.leave(A)
    assert lone.size(0.3) == 200


def test_one_whose_first_token_is_not_seen_does_not_count_for_long():
    """An answer that is no stream comes whole, when its prompt was computed long ago."""
    lone = LonePrompts()
    lone.enter(A, 300, 0.0)
    lone.enter(B, 200, COUNTED_S / 2)

    assert [lone.size(now) for now in (0.9 * COUNTED_S, COUNTED_S, 2 * COUNTED_S)] == [500, 200, 0]
