"""The questions of ``pdrelay prove`` and its comparison, for tests that ask engines and routers of their own."""

import random

import httpx

from pdrelay_tools.http_reply import Reply
from pdrelay_tools.proving.core.answer import SMALLEST_TOLERANCE
from pdrelay_tools.proving.core.answer import differences as found_by_prove
from pdrelay_tools.proving.core.question import TOKENS, WORDS, Prompts, Question, Shape
from pdrelay_tools.proving.core.reply import read_reply

__all__ = ["TOKENS", "WORDS", "Question", "Shape", "ask", "client", "compare", "differences", "ids", "questions"]


def questions(count, *, seed, longest=1500):
    """Return questions of 8 to ``longest`` tokens in all shapes, as the suite asks them."""
    return Prompts(random.Random(seed)).mixed(count, longest=longest)


def ids(prompt, *, stream=False):
    """Return the question for these token ids."""
    return Question(Shape.IDS, tuple(prompt), stream)


def client(url):
    """Return a client for a router or an engine; close it, or use it in a ``with`` block."""
    return httpx.Client(base_url=url, timeout=120, trust_env=False)


def ask(api, question, *, tokens=TOKENS, **engine_fields):
    """Ask a question and return the answer; an engine, not a router, may be told more in ``engine_fields``.

    Raises httpx.HTTPStatusError, with what was answered in place of an answer.
    """
    response = api.post(question.path, json=question.body("tiny") | {"max_tokens": tokens} | engine_fields)
    if response.is_error:
        raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
    answer = read_reply(question, Reply(response.status_code, response.content, "", False, 0.0, 0.0))
    assert sum(len(one.tokens) for one in answer.choices) == answer.completion_tokens, "every token has a logprob"
    return answer


def compare(url, asked, reference_answer):
    """Ask every question through a router; return our answers, and what differs from the reference's."""
    with client(url) as api:
        answers = [ask(api, question) for question in asked]
    wrong = {
        f"{number}: {question}": found
        for number, (question, answer) in enumerate(zip(asked, answers, strict=True))
        if (found := differences(answer, reference_answer(question)))
    }
    return answers, wrong


def differences(ours, reference):
    """Name and describe what differs between two answers; texts and tokens exactly, logprobs but for rounding.

    The last prompt token is computed alone by a decode engine and among others by a single one. In float32 those sums
    can differ in the last digit: seen in 1 of 113 answers. A wrong block moves logprobs by 0.01 or more.
    """
    return [f"{each.name}: {each.evidence}" for each in found_by_prove(ours, reference, SMALLEST_TOLERANCE)]
