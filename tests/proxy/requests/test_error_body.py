"""What an exception becomes for a client; which status each has is in tests/proxy/api/test_exception_handlers.py."""

import json

import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.errors import EngineError, OutOfTime
from pdrelay_proxy.requests.error_body import last_event


@pytest.mark.parametrize("error", [EngineError("decode-0 broke off"), OutOfTime("too long")])
@pytest.mark.parametrize(
    ("path", "name", "at"),
    [
        (Api.COMPLETIONS, None, ("error", "message")),
        (Api.CHAT, None, ("error", "message")),
        ("/v1/audio/transcriptions", None, ("error", "message")),
        (Api.RESPONSES, "error", ("message",)),
        (Api.MESSAGES, "error", ("error", "message")),
    ],
)
def test_a_stream_that_fails_says_so_in_the_words_of_its_api(path, name, at, error):
    """Each library looks for its own sort of error, and none may take half an answer for all of it."""
    event = last_event(error, path).decode()

    assert event.startswith("\n")  # also behind a line without the empty one that ends its event
    assert event.endswith("\n\n")
    assert event[1:].startswith("data: " if name is None else f"event: {name}\ndata: ")
    said = json.loads(event.partition("data: ")[2])
    for key in at:
        said = said[key]
    assert said == str(error)
    assert "[DONE]" not in event
