"""Engines of unequal shapes: whatever P and D look like, text and logprobs are those of a single engine.

A row of the compatibility table in ``docs/connector-shapes.md`` is an id of ``test_equal``: what moves, who moves it.
"""

import random
import re

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector
from support.cluster import engine_spec, start_engine
from support.legs import decode, prefill, text_of
from support.models import one_head_model
from support.questions import ask, client, ids
from support.shapes import (
    BYTES,
    CACHED,
    COMPUTED,
    LOADED,
    ROWS,
    SHAPES,
    STAGED_IN,
    STAGED_OUT,
    Gang,
    most_bytes,
    random_questions,
    watched,
    wrong_answers,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# Around the blocks of 32 and 64 tokens, and the steps of 256.
LENGTHS = (2, 32, 33, 64, 65, 66, 97, 257, 700, 1500)
MODES = [mode.value for mode in TransferMode]
# Both modes have the same plan. Replicated heads, whose two engines take half a minute to start, are moved in one.
REPLICATED = [row for row in ROWS if row.startswith("shared-head")]
EXTRA = 1  # token that :func:`watched` has each engine compute at the end


@pytest.fixture(scope="module")
def models(model, tmp_path_factory):
    """Where the models of :data:`SHAPES` are."""
    made = tmp_path_factory.mktemp("models")
    return {"tiny": model, "one-head": one_head_model(made / "one-head")}


@pytest.fixture(scope="module")
def single(fleet, models, reference):
    """What an engine of that model without a connector answers."""
    others = {name: engine_spec(f"reference-{name}", path) for name, path in models.items() if name != "tiny"}
    children = [start_engine(fleet, spec) for spec in others.values()]
    fleet.wait_ready(children, timeout_s=300)
    specs = {"tiny": reference, **others}

    def answers_of(name):
        def answer(question):
            with client(specs[name].base_url) as api:
                return ask(api, question)

        return answer

    yield answers_of
    fleet.stop(*children)


@pytest.fixture(scope="module")
def gang(request, fleet, models, single):
    """The engines that move KV in one way."""
    gang = Gang(fleet, models, TransferMode(request.param))
    yield gang
    gang.stop()


# Both modes have the same plan: the ordinary tests have each row in one of them, or its twin with shared heads, and
# staging on both sides. Engines of two ranks each, whose ranks pair up as single ones do, are four processes on two
# cores.
THOROUGH = {
    ("tp1-to-tp2", "push"),
    ("tp2-to-tp1", "pull"),
    ("tp2-to-tp2", "pull"),
    ("tp2-to-tp2", "push"),
    ("block32-to-64", "push"),
    ("block64-to-32", "pull"),
    ("staged-on-p", "pull"),
    ("staged-on-d", "push"),
    ("staged-on-both", "push"),
    ("shared-head-tp2-to-tp1", "pull"),
    ("tp1-to-tp2", "pull"),
}


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``."""
    if test == "test_a_hundred_requests_through_a_tenth_of_the_cache":
        return params["gang"] == "pull"
    return "row" in params and (params["row"], params["gang"]) in THOROUGH


@pytest.mark.parametrize("gang", MODES, indirect=True, scope="module")
@pytest.mark.parametrize("row", [row for row in ROWS if row not in REPLICATED])
def test_equal(row, gang, single):
    """Asked one by one and six at once; D computed one token of each prompt, and its own cache served what it had."""
    check_equal(row, gang, single)


def check_equal(row, gang, single):
    pair = gang.pair(row)
    (p, d) = (SHAPES[name] for name in ROWS[row])
    asked = random_questions(LENGTHS, seed=f"{row} {gang.mode}")
    again = [ids(asked[i].prompt[:290] + asked[2].prompt) for i in (8, 9)]
    rnd = random.Random(f"more {row} {gang.mode}")
    more = random_questions([rnd.randrange(8, 600) for _ in range(6)], seed=f"{row} {gang.mode} at once")
    with watched(pair) as (prefilled, decoded):
        wrong = wrong_answers(pair, asked + again, single(p.model))
        wrong_at_once = wrong_answers(pair, more, single(p.model), at_once=6)

    prompts = [question.prompt for question in (*asked, *again, *more)]
    assert (wrong, wrong_at_once) == ({}, {})
    assert decoded.delta(COMPUTED) == len(prompts) + EXTRA
    assert decoded.delta(LOADED) + decoded.delta(CACHED) == sum(len(prompt) - 1 for prompt in prompts)
    sent = prefilled.delta(BYTES) + decoded.delta(BYTES)
    assert 0 < sent <= most_bytes(prompts)
    for staged, copied in ((p.staged, prefilled.delta(STAGED_OUT)), (d.staged, decoded.delta(STAGED_IN))):
        assert copied >= sent if staged else copied == 0


@pytest.mark.parametrize("gang", MODES, indirect=True, scope="module")
def test_a_hundred_requests_through_a_tenth_of_the_cache(gang, single):
    """They need the staging buffers of both engines many times over: they wait for room, and each gets its own KV."""
    pair = gang.pair("staged-on-both")
    rnd = random.Random(f"hundred {gang.mode}")
    asked = random_questions([rnd.randrange(40, 700) for _ in range(100)], seed=f"hundred {gang.mode}")
    with watched(pair) as (_, decoded):
        wrong = wrong_answers(pair, asked, single("tiny"), at_once=100)

    assert wrong == {}
    assert decoded.delta(COMPUTED) == len(asked) + EXTRA


@pytest.mark.parametrize("gang", ["pull"], indirect=True, scope="module")
def test_an_engine_of_another_dtype_is_refused_in_one_sentence(gang, fleet, model, single):
    """D computes the prompt itself, and says why."""
    _, name = ROWS["staged-on-both"]
    d = gang.pair("staged-on-both").d
    p = engine_spec("other-dtype", model, connector=Connector.PDRELAY, extra_args=("--dtype", "bfloat16"))
    child = start_engine(fleet, p)
    fleet.wait_ready([child], timeout_s=300)
    (question,) = random_questions([200], seed="other dtype")
    prompt = list(question.prompt)
    text = text_of(decode(d, prompt, prefill(p, prompt)))
    fleet.stop(child)

    assert text == single("tiny")(question).text
    assert re.search(
        r"^.*WARNING.*(torch\.float32.*torch\.bfloat16|torch\.bfloat16.*torch\.float32)",
        gang.log_of(name),
        re.MULTILINE,
    )


@pytest.mark.parametrize("gang", ["pull"], indirect=True, scope="module")
@pytest.mark.parametrize("row", REPLICATED)
def test_equal_with_replicated_heads(row, gang, single):
    """Ranks that keep the same head share the work, or one of them has none."""
    check_equal(row, gang, single)
