"""Words of a short list."""

from enum import auto

from pdrelay_proxy.core.fast_enum import FastStrEnum


class Colour(FastStrEnum):
    """An example."""

    RED = auto()
    BLUE = "azure"


def test_a_word_is_found_by_its_text():
    """Equal things hash alike: in tables, in sets and in the keys of counters."""
    assert {Colour.RED: 1}["red"] == {"red": 1}[Colour.RED] == {("x", Colour.RED): 1}["x", "red"] == 1
    assert {Colour.BLUE, "azure"} == {"azure"}
    assert Colour("azure") is Colour.BLUE
