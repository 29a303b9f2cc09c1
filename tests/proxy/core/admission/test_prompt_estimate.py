"""About how many tokens a prompt has, before an engine has counted them."""

import json

import pytest

from pdrelay_proxy.core.admission.prompt_estimate import MEDIUM_TOKENS, prompt_tokens
from pdrelay_proxy.core.protocol.client_body import parse

MEDIA = "QUJD" * 100_000
DATA_URL = f"data:image/png;base64,{MEDIA}"
TEXT = "once upon a time " * 1000


def estimate(**fields):
    body = json.dumps(fields).encode()
    return prompt_tokens(parse(body), len(body))


def chat(*parts, before=()):
    return [*before, {"role": "user", "content": [{"type": "text", "text": TEXT}, *parts]}]


def by_bytes(**fields):
    return len(json.dumps(fields)) // 4


IMAGE = {"type": "image_url", "image_url": {"url": DATA_URL}}
ONE_MEDIUM = {
    "image": {"messages": chat(IMAGE)},
    "image, plain": {"messages": chat({"type": "image_url", "image_url": DATA_URL})},
    "audio": {"messages": chat({"type": "input_audio", "input_audio": {"data": MEDIA, "format": "wav"}})},
    "audio, by url": {"messages": chat({"type": "audio_url", "audio_url": {"url": DATA_URL}})},
    "video": {"messages": chat({"type": "video_url", "video_url": {"url": DATA_URL}})},
    "embeddings": {"messages": chat({"type": "image_embeds", "image_embeds": MEDIA})},
    "responses": {"input": chat({"type": "input_image", "image_url": DATA_URL})},
    "messages": {"messages": chat({"type": "image", "source": {"type": "base64", "data": MEDIA}})},
    "result of a tool": {
        "messages": chat(
            {"type": "tool_result", "content": [{"type": "image", "source": {"type": "base64", "data": MEDIA}}]}
        )
    },
    "batch": {"messages": [chat(IMAGE), chat()]},
    "score": {"text_1": TEXT, "data_2": {"content": [IMAGE]}},
    "embed": {"inputs": [{"content": [{"type": "text", "text": TEXT}, IMAGE]}]},
    "prompt embeddings": {"prompt": TEXT, "prompt_embeds": MEDIA},
    "tokens": {"token_ids": [1] * 5000, "features": {"kwargs_data": {"image": [MEDIA]}}},
}


@pytest.mark.parametrize("kind", ONE_MEDIUM)
def test_media_cost_a_flat_amount_and_text_a_quarter_of_its_bytes(kind):
    """Whatever their size: base64 has a hundred times the bytes of the tokens that become of it."""
    fields = ONE_MEDIUM[kind]
    text = (len(json.dumps(fields)) - len(MEDIA)) // 4

    assert text - 50 <= estimate(**fields) - MEDIUM_TOKENS <= text


def test_each_medium_counts():
    """Of all messages."""
    two = estimate(messages=chat(IMAGE, before=chat(IMAGE)))

    assert two - estimate(messages=chat(before=chat())) == pytest.approx(2 * MEDIUM_TOKENS, abs=50)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": TEXT},
        {"prompt": [1] * 5000},
        {"messages": [{"role": "user", "content": TEXT}]},
        {"messages": chat()},
        {"messages": chat({"type": "text", "text": DATA_URL})},
        {"messages": [{"role": "user", "content": DATA_URL, "image_url": "a"}]},
        {"messages": chat({"type": "tool_use", "name": "f", "input": {"content": [IMAGE], "data": MEDIA}})},
        {"messages": chat(), "tools": [{"function": {"parameters": {"content": [IMAGE]}}}]},
        {"messages": chat(), "documents": [{"data": MEDIA}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": json.dumps(IMAGE)}}]}]},
        {"messages": {"content": 7}},
    ],
    ids=range(11),
)
def test_text_is_charged_wherever_it_stands(fields):
    """A name or a beginning like that of an image does not hide it."""
    assert estimate(**fields) == pytest.approx(by_bytes(**fields), abs=1)


@pytest.mark.parametrize("content", [[{}] * 5_000, [[{}]] * 5_000, [{}, *[0] * 100_000]], ids=["{}", "[{}]", "0"])
def test_a_request_of_very_many_parts_is_not_looked_at_to_its_end(content):
    """It is charged by its bytes: clients could keep the router busy."""
    fields = {"messages": chat(IMAGE, before=[{"role": "user", "content": content}])}

    assert estimate(**fields) == pytest.approx(by_bytes(**fields), abs=1)


def nested(levels):
    return [IMAGE] if levels == 0 else [{"content": nested(levels - 1)}]


def test_contents_of_contents_are_looked_at_some_levels_deep():
    """vLLM reads two."""
    shallow, deep = {"messages": nested(3)}, {"messages": nested(300)}

    assert estimate(**shallow) < MEDIUM_TOKENS + 100
    assert estimate(**deep) == by_bytes(**deep)
