"""The prefill engine's token shown at once, by the whole router, before engines that notice each broken rule."""

import json

import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.features.first_token.settings import FirstTokenFrom, FirstTokenSettings
from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.rules import expected_text
from support.sim import router, sims

BASE = {"stream": True, "temperature": 0, "max_tokens": 6, "stream_options": {"include_usage": True}}
BODIES = {
    Api.COMPLETIONS: BASE | {"prompt": "over the hill"},
    Api.CHAT: BASE | {"messages": [{"role": "user", "content": "over the hill"}]},
}
FROM_PREFILL = FirstTokenSettings(FirstTokenFrom.PREFILL)
FIRST = Settings().with_features(FROM_PREFILL)
RESUMING = Settings(resume_streams=True).with_features(FROM_PREFILL)


async def asked_twice(engines, api, settings):
    """Ask twice; return what the second stream says. The first has taught the router what the engines offer."""
    async with router(engines, settings) as client:
        await client.post(api, json=BODIES[api])
        answer = await client.post(api, json=BODIES[api])
    assert not [each for sim in engines.values() for each in sim.violations]
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert answer.text.endswith("data: [DONE]\n\n")
    return text, usage["completion_tokens"], answer.headers["server-timing"]


@pytest.mark.parametrize("settings", [FIRST, RESUMING], ids=["as it is", "resuming"])
@pytest.mark.parametrize("offers", [True, False])
@pytest.mark.parametrize("api", BODIES)
async def test_the_text_is_that_of_one_engine(api, offers, settings):
    """Whichever engine makes its first word; engines that offer none are asked as always."""
    engines = sims(offers=offers)
    text, made, timing = await asked_twice(engines, api, settings)

    assert (text, made) == (expected_text(BODIES[api]), 6)
    assert ("decode;" in timing) != offers
    asked = json.loads(engines["d0"].log[1].body)
    assert asked["max_tokens"] == (5 if offers else 6)
