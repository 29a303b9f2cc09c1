"""What a client gets to see of a request does not tell by which name its blocks are handed over."""

import json
import logging

import pytest

from support.sim import router, sims

BODY = {"prompt": "a b c", "max_tokens": 3, "stream": True}


def transfers(engines):
    """The names in the legs that engines got."""
    found = [json.loads(one.body).get("kv_transfer_params", {}) for sim in engines.values() for one in sim.log]
    return {params["transfer_id"] for params in found if params.get("transfer_id")}


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_an_answer_does_not_name_its_transfer(mode, caplog):
    """In push whoever names a transfer first is written its blocks, and an answer's id is the engines' request id."""
    caplog.set_level(logging.INFO)
    engines = sims(mode=mode)
    async with router(engines) as client:
        answers = [await client.post("/v1/completions", json=BODY, headers=headers) for headers in ({}, {}, SHOWN)]

    names = transfers(engines)
    assert [answer.status_code for answer in answers] == [200] * len(names)
    assert len(names) == 3
    seen = "".join(answer.text + str(answer.headers) for answer in answers)
    for name in names:
        secret = name.removeprefix("xfer-").split("-r")[0]
        assert secret not in seen
        assert (secret in caplog.text) is (mode == "push")  # for the operator, who has to find it in the engines' logs


SHOWN = {"X-Request-Id": "mine"}
