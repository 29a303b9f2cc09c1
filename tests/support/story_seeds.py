"""How many stories each test of kinds of caches plays: PDRELAY_KIND_SEEDS."""

import os

import pytest

FEW = 3
SEEDS = int(os.environ.get("PDRELAY_KIND_SEEDS", FEW))


def story_marks(seconds):
    """Return the marks of a module of stories; ``seconds``: what each further seed may take its longest test."""
    marks = [
        pytest.mark.usefixtures("no_warnings"),
        pytest.mark.timeout(240 + seconds * (SEEDS - FEW)),  # importing vLLM takes half a minute on a busy machine
    ]
    return marks if SEEDS <= FEW else [*marks, pytest.mark.slow]  # whoever wants more has the time
