"""What operators are told of requests with several prompts: before one is sent, and once it is over."""

from pdrelay_proxy.features.why.settings import WhySettings
from pdrelay_proxy.settings import Settings
from support.sim import router, sims

KEY = {"X-Api-Key": "sesame"}
OPEN = Settings(admin_key="sesame", health_check_interval_s=0.0)
PROMPT = {"prompt": "hello", "max_tokens": 3}


async def ask(client, name):
    response = await client.get(f"/requests/{name}", headers=KEY)
    return response.status_code, response.json()


async def explain(client, **body):
    asked = {"path": "/v1/completions", "body": {"model": "sim"} | body, "headers": {}}
    return (await client.post("/instances/explain", json=asked, headers=KEY)).json()


async def test_explain_of_several_prompts():
    """Each goes its own way, if the first one can be split; else all of them go to one engine."""
    async with router(sims(), OPEN) as client:
        each = await explain(client, prompt=["a", "b", "c"], max_tokens=5)
        whole = await explain(client, prompt=["a", "b"], echo=True)

    assert each["rule"] == "each of 3 prompts by itself, the first: prefill first, then decode"
    assert each["prefill_body"]["prompt"] == "a"
    assert (whole["rule"], whole["prefill"]) == ("single: echo", None)
    assert whole["decode_body"]["prompt"] == ["a", "b"]


async def test_the_prompts_of_one_request_are_one_request():
    """Their records are those of the whole."""
    async with router(sims(), OPEN) as client:
        whole = (await client.post("/v1/completions", json={**PROMPT, "prompt": ["a", "b"]})).headers["x-request-id"]
        status, found = await ask(client, whole[:-1])

    assert (status, {each["request_id"][: len(whole)] for each in found["requests"]}) == (200, {whole})


async def test_a_request_with_many_prompts_is_one_entry():
    """It leaves the requests before it in the history; its notes name prompts that can be asked for."""
    async with router(sims(), OPEN.with_features(WhySettings(request_history=4))) as client:
        before = (await client.post("/v1/completions", json=PROMPT)).headers["x-request-id"]
        response = await client.post("/v1/completions", json=PROMPT | {"model": "sim", "prompt": ["hello"] * 20})
        name = response.headers["x-request-id"]
        _, found = await ask(client, name)
        said = [note for note in found["requests"][0]["notes"] if note.startswith(f"{name}-p")]
        _, part = await ask(client, said[0].split()[0])
        assert (await ask(client, before))[0] == 200

    assert response.status_code == 200
    assert (len(found["requests"]), found["omitted"], len(said)) == (1, 0, 8)
    assert found["requests"][0]["mode"] == "each_prompt"
    assert any(note.startswith("20 prompts are over") for note in found["requests"][0]["notes"])
    assert said[0].endswith(" ms prefill-0 decode-0")
    assert [row["what"] for row in part["requests"][0]["rows"]].count("decode leg") == 1
