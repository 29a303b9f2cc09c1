"""Prompts that no cache has, of every shape and length."""

import random
from itertools import pairwise

from pdrelay_tools.proving.core.question import Prompts, Question, Shape


def test_prompts_share_nothing():
    """What a decode engine has in its cache is not moved, and so not checked."""
    prompts = Prompts(random.Random(1))
    found = [prompts.ids(40)[:16] for _ in range(200)]

    assert len(set(found)) == 200
    assert len({prompts.text(5).split()[0] for _ in range(200)}) == 200


def test_one_seed_gives_one_run():
    """A finding can be had again."""
    first, again = (Prompts(random.Random(7)).mixed(20, longest=500) for _ in range(2))

    assert first == again


def test_mixed_questions_have_every_shape_and_length():
    asked = Prompts(random.Random(3)).mixed(24, longest=1500)
    lengths = [len(question.prompt) for question in asked if question.shape is Shape.IDS]

    assert {(question.shape, question.stream) for question in asked} == {(s, t) for s in Shape for t in (False, True)}
    assert min(lengths) < 20
    assert max(lengths) > 500


def test_some_questions_continue_others():
    """A prefix that is cached is another path through both engines."""
    asked = Prompts(random.Random(3)).mixed(24, longest=1500)
    shares = [
        one.prompt[: len(one.prompt) // 2] == other.prompt[: len(one.prompt) // 2]
        for shape in Shape
        for one, other in pairwise(question for question in asked if question.shape is shape)
    ]

    assert sum(shares) >= 3


def test_fields_win_and_models_may_be_others():
    question = Question(Shape.CHAT, "hi", stream=True, fields={"temperature": 0.7}, model="adapter")

    body = question.body("base")

    assert (body["model"], body["temperature"]) == ("adapter", 0.7)
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["stream_options"] == {"include_usage": True}
