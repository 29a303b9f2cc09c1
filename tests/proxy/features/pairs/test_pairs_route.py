"""``GET /pairs``, and what the document says of it."""

from dataclasses import fields

from pdrelay_proxy.features.pairs.pair_row import PairRow
from pdrelay_proxy.features.pairs.schemas import PairList, PairOfEngines
from pdrelay_proxy.settings import Settings
from support.sim import router, sims


async def test_the_answer_is_what_the_document_says():
    """It has no field besides."""
    async with router(sims(), Settings(admin_key="sesame")) as client:
        await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
        answer = await client.get("/pairs", headers={"X-Api-Key": "sesame"})

    read = PairList.model_validate_json(answer.content, strict=True)
    assert read.model_dump(mode="json") == answer.json()
    assert [row.handovers for row in read.pairs] == [1]


async def test_operators_alone_may_ask(tmp_path):
    """It shows the fleet: neither a client's key opens it, nor that of a host that has joined."""
    keys, join = tmp_path / "keys", tmp_path / "join"
    keys.write_text("me:sk-1-of-16-chars\n")
    join.write_text("join-me\n")
    settings = Settings(admin_key="sesame", api_keys_file=str(keys), join_key_file=str(join))
    async with router(sims(), settings) as client:
        shown = {"Authorization": "Bearer sk-1-of-16-chars"}, {"X-Api-Key": "join-me"}, {"X-Api-Key": "sesame"}
        answers = [(await client.get("/pairs", headers=headers)).status_code for headers in shown]
        wrong = await client.patch("/pairs", headers=shown[-1])

    assert answers == [401, 403, 200]
    assert wrong.json() == {"detail": "Method Not Allowed"}


def test_the_document_names_what_the_list_of_pairs_has():
    """A field that is missing there is one that no generated client has."""
    assert PairOfEngines.model_fields.keys() == {each.name for each in fields(PairRow)}
