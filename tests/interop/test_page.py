"""The page of the matrix is what its last run has seen; no engine is started here."""

from interop import page
from interop.kinds import ENGINES
from interop.matrix import PEERS
from interop.properties import PROPERTIES


def test_the_page_is_what_was_seen():
    """Nobody edits it: a cause that has changed is on the page, too."""
    seen = page.seen()

    assert page.PAGE.read_text() == page.text(seen, PEERS, ENGINES)


def test_whatever_is_tried_was_seen_with_every_property():
    """A row that is missing, or a cell, would be taken for something that works."""
    seen = page.seen()

    assert {name: [*row["cells"]] for name, row in seen.items()} == {
        each.name: sorted(PROPERTIES) for each in (*PEERS, *ENGINES)
    }


def test_what_does_not_hold_has_a_cause():
    """A cell without one is a fault that nobody has looked at."""
    seen = page.seen()
    bare = [
        f"{each.name}: {name}"
        for each in (*PEERS, *ENGINES)
        for name, cell in seen[each.name]["cells"].items()
        if cell["holds"] == (name in each.causes)
    ]

    assert bare == []
