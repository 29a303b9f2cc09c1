"""What a key's requests have cost, in tokens, counts against its quota."""

import asyncio
from dataclasses import replace

import pytest

from pdrelay_proxy.core.admission.prompt_estimate import MEDIUM_TOKENS
from pdrelay_proxy.settings import Settings
from support.scripted import DONE, Scripted, call, pulled_prefill, router_of
from support.sim import router, sims

PROMPT = "once upon a time"
ASKED = {
    "completion": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 40}),
    "stream": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "stream": True}),
    "stream with usage": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 40, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "several prompts": ("/v1/completions", {"prompt": [PROMPT, PROMPT], "max_tokens": 20}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "model": "sim"}),
    "one engine": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "min_tokens": 1}),
}


def key(name):
    return {"Authorization": f"Bearer {name}-key-of-16-chars"}


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "keys").write_text("a:a-key-of-16-chars\nb:b-key-of-16-chars\n")
    return Settings(api_keys_file=str(tmp_path / "keys"))


@pytest.mark.parametrize("kind", ASKED)
async def test_an_answer_counts_and_the_next_request_over_the_quota_is_refused(kind, settings):
    """With 429, by the setting's name and with the seconds to wait; other keys are served."""
    path, body = ASKED[kind]
    async with router(sims(1, 1), replace(settings, max_key_tokens_per_minute=3)) as client:
        first = await client.post(path, json=body, headers=key("a"))
        second = await client.post(path, json=body, headers=key("a"))
        other = await client.post(path, json=body, headers=key("b"))

    assert [first.status_code, second.status_code, other.status_code] == [200, 429, 200]
    assert "max_key_tokens_per_minute" in second.text
    assert int(second.headers["retry-after"]) > 0


@pytest.mark.parametrize("kind", ["completion", "stream", "stream with usage", "chat"])
async def test_generated_tokens_count_as_many_as_there_were(kind, settings):
    """40, and those of the prompt, which are few: far from a quota of 200, over one of 35."""
    path, body = ASKED[kind]
    for quota, status in ((35, 429), (200, 200)):
        async with router(sims(1, 1), replace(settings, max_key_tokens_per_minute=quota)) as client:
            await client.post(path, json=body, headers=key("a"))
            second = await client.post(path, json=body, headers=key("a"))

        assert second.status_code == status


@pytest.mark.parametrize(("quota", "status"), [(35, 429), (200, 200)])
async def test_each_event_of_a_stream_counts_however_many_reads_it_takes(quota, status, settings):
    """Without usage it has nothing else."""
    path, body = ASKED["stream"]
    async with router(sims(1, 1, token_s=0.002), replace(settings, max_key_tokens_per_minute=quota)) as client:
        await client.post(path, json=body, headers=key("a"))
        second = await client.post(path, json=body, headers=key("a"))

    assert second.status_code == status


@pytest.mark.parametrize("name", [b"", b"event: delta\n"])
async def test_an_event_counts_once_whatever_its_text(name):
    """A text about streams has the mark of an event in it; with usage nothing is counted so."""
    event = name + b'data: {"choices":[{"text":"data: a, data: b, data: c"}]}\n\n'

    async def decode(_):
        return 200, [event, event + event, *[event] * 7, DONE]

    router = router_of(Scripted(pulled_prefill, decode), limits=Settings(max_key_tokens_per_minute=20))
    statuses = [(await router.serve(call(stream=True), name=name)).status for name in ("r0", "r1", "r2")]

    assert statuses == [200, 200, 429]


async def test_a_request_that_engines_refuse_costs_nothing(settings):
    """Its tokens were never served."""
    async with router(sims(1, 1), replace(settings, max_key_tokens_per_minute=30)) as client:
        for _ in range(10):
            answer = await client.post(
                "/v1/completions", json={"prompt": PROMPT * 5, "max_tokens": -1}, headers=key("a")
            )
            assert answer.status_code == 400
        served = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}, headers=key("a"))

    assert served.status_code == 200


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + b"a" * 400_000 + b"\r\n--b--\r\n"
)
FORM_TYPE = {"Content-Type": "multipart/form-data; boundary=b"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 100_000}}


async def transcribe(client):
    return await client.post("/v1/audio/transcriptions", content=FORM, headers=key("a") | FORM_TYPE)


async def look(client):
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}, IMAGE]}], "max_tokens": 2}
    return await client.post("/v1/chat/completions", json=body, headers=key("a"))


@pytest.mark.parametrize("ask", [transcribe, look])
async def test_the_bytes_of_media_are_not_charged_as_text(ask, settings):
    """Neither while a request is under way nor, where the answer tells no tokens, for good."""
    async with router(sims(1, 1), replace(settings, max_key_tokens_per_minute=5000)) as client:
        together = await asyncio.gather(*(ask(client) for _ in range(3)))

    assert [answer.status_code for answer in together] == [200] * 3


async def test_a_transcription_is_charged_a_flat_amount(settings):
    """Nobody has counted its tokens. All but one are free again after a minute."""
    async with router(sims(1, 1), replace(settings, max_key_tokens_per_minute=MEDIUM_TOKENS + 1)) as client:
        answers = [(await transcribe(client)).status_code for _ in range(3)]

    assert answers == [200, 200, 429]
