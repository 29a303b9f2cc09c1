"""The prompts of requests under way are read once, and few of them are kept."""

from pdrelay_proxy.core.model import RoutingHints
from pdrelay_proxy.features.kv_events.core.prompt_lookup import BYTES_MOST, PROMPTS_MOST, PromptLookup


def hints(*ids):
    return RoutingHints(prompt=str([*ids]).encode())


def test_a_prompt_is_read_once_however_many_come_between():
    """The decode leg goes out behind those of other requests; one that is sent again has the same prompt."""
    lookup = PromptLookup(None, lambda: 0.0)
    first = hints(1, 2)
    found = lookup.find(first)
    for number in range(PROMPTS_MOST - 1):
        lookup.find(hints(number))

    assert lookup.find(first.once_more()) is found
    assert found.ids.count == 2


def test_equal_prompts_of_two_requests_are_two():
    """Another salt, or another time: what was known of the first need not be true of the second."""
    lookup = PromptLookup(None, lambda: 0.0)

    assert lookup.find(hints(1)) is not lookup.find(hints(1))


def test_the_oldest_are_forgotten():
    """By their number and by their bytes; the latest is kept however long it is."""
    lookup = PromptLookup(None, lambda: 0.0)
    first = hints(1)
    found = lookup.find(first)
    for number in range(PROMPTS_MOST):
        lookup.find(hints(number))
    assert lookup.find(first) is not found

    long = RoutingHints(prompt=b'"%b"' % (b"x" * BYTES_MOST))
    kept = lookup.find(long)
    assert lookup.find(long) is kept
    assert len(lookup._prompts) == 1
