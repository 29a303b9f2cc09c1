"""What is tried on every program, once for all of them: each returns what it has seen, or raises Missed."""

import itertools
import time
from collections.abc import Callable

import httpx

from interop.stage import ANSWER_S, Missed, Stage, counted, seconds_until, seconds_until_rest
from pdrelay_tools.proving.core.answer import Malformed, events_of, read
from pdrelay_tools.proving.core.question import Question, Shape
from support.cluster import MODEL_NAME
from support.questions import questions

ASKED = 24
AT_ONCE = 2.0  # s; what engines hold for longer is said
LONG = 1500  # tokens of an answer whose client leaves
BACK_S = 60.0
NEXT = Question(Shape.TEXT, "is anybody there", max_tokens=4, logprobs=False)
LIKELIEST = {"temperature": 1.0, "top_k": 1}  # vLLM takes no n > 1 without sampling


def equal(stage: Stage) -> str:
    """Text and logprobs of prompts of all shapes and lengths are those of one engine."""
    asked = questions(ASKED, seed=44)
    for question in asked:
        stage.right_answer(question)
    before = counted(stage.pair.decode)
    wrong = [f"{question}: {found}" for question in asked if (found := stage.difference(question))]
    seconds_until_rest(stage.pair.prefill, stage.pair.decode)
    after = counted(stage.pair.decode)
    stage.seen.update({name: value - before.get(name, 0.0) for name, value in after.items()})
    if wrong:
        raise Missed(f"{ASKED - len(wrong)} of {ASKED} equal; {wrong[0]}")
    return f"{ASKED} of {ASKED}"


def moved(stage: Stage) -> str:
    """Each of those prompts came from P: D computed at most the last token of it."""
    computed = stage.seen["vllm:prompt_tokens_by_source_total|local_compute"]
    loaded = stage.seen["vllm:prompt_tokens_by_source_total|external_kv_transfer"]
    said = f"{loaded:.0f} tokens loaded, {computed:.0f} computed by D"
    loads = stage.seen.get(stage.loads, 0.0) if stage.loads else float(ASKED)
    if loads < ASKED or computed > ASKED or not loaded:
        bare = stage.seen.get("vllm:pdrelay_requests_without_kv_params_total", 0.0)
        raise Missed(f"{loads:.0f} of {ASKED} loads; {said}; {bare:.0f} requests without parameters")
    return said


def choices(stage: Stage) -> str:
    """With n = 2 both choices are one engine's, and P's blocks are free again."""
    return _compared(stage, {"prompt": " ".join(["river"] * 60), "n": 2, "max_tokens": 8, **LIKELIEST})


def arrays(stage: Stage) -> str:
    """An array of two prompts has two answers, one engine's, and P's blocks are free again."""
    prompts = [" ".join(["lantern"] * 50), " ".join(["copper"] * 70)]
    return _compared(stage, {"prompt": prompts, "max_tokens": 8})


def _compared(stage: Stage, body: dict[str, object]) -> str:
    right = stage.whole(body, at=stage.reference.base_url)
    texts = [each.text for each in stage.whole(body).choices]
    wanted = [each.text for each in right.choices]
    if texts != wanted:
        raise Missed(f"{len(texts)} choices: {texts}, one engine has {wanted}")
    held = seconds_until_rest(stage.pair.prefill, stage.pair.decode)
    return "equal" if held < AT_ONCE else f"equal; P holds the blocks for {held:.0f} s"


def errors(stage: Stage) -> str:
    """What an engine refuses is refused with the engine's own status."""
    right = {"model": MODEL_NAME, "prompt": "north", "max_tokens": 4}
    cases: dict[str, object] = {
        "no such model": right | {"model": "nosuch"},
        "max_tokens: -1": right | {"max_tokens": -1},
        'temperature: "hot"': right | {"temperature": "hot"},
        "a prompt beyond the context": right | {"prompt": [30] * 4000},
        "half a JSON object": b'{"model": "tiny", "prompt": ',
    }
    found: list[str] = []
    for name, body in cases.items():
        wanted = stage.post(body, at=stage.reference.base_url).status_code
        try:
            seen = str(stage.post(body).status_code)
        except httpx.HTTPError as exc:
            seen = f"no answer ({type(exc).__name__})"
        if seen != str(wanted):
            found.append(f"{name}: {seen}, the engine has {wanted}")
    seconds_until_rest(stage.pair.prefill, stage.pair.decode)
    if found:
        raise Missed("; ".join(found))
    return f"{len(cases)} of {len(cases)}"


def leaves(stage: Stage) -> str:
    """When a client leaves in the middle of a stream, both engines drop its request, and the blocks are free."""
    before = counted(stage.pair.decode)["vllm:generation_tokens_total"]
    question = _long("the client leaves", LONG)
    with stage.stream(question) as pieces:
        next(pieces)
    held = seconds_until_rest(stage.pair.prefill, stage.pair.decode)
    made = counted(stage.pair.decode)["vllm:generation_tokens_total"] - before
    if made >= LONG:
        raise Missed(f"D computes all {LONG} tokens for nobody")
    return f"D stops after {made:.0f} of {LONG} tokens; all blocks free after {held:.1f} s"


def dies(stage: Stage) -> str:
    """P is killed while D writes an answer: it comes whole. The next request has an end, and D goes on."""
    question = _long("the prefill engine dies", 300)
    wanted = stage.right_answer(question).text
    with stage.stream(question) as pieces:
        body = next(pieces)
        stage.kill_prefill()
        body += b"".join(pieces)
    events, is_done = events_of(body)
    if not is_done or read(events).text != wanted:
        raise Missed("the stream that D writes is cut")
    begun = time.monotonic()
    try:
        response = stage.post(NEXT.body(MODEL_NAME))
        said = f"HTTP {response.status_code}{'' if response.is_error else _said_of(stage, response)}"
    except httpx.TimeoutException:
        raise Missed(f"the next request has no answer within {ANSWER_S:.0f} s") from None
    except httpx.HTTPError as exc:
        said = f"a broken connection ({type(exc).__name__})"
    seconds = time.monotonic() - begun
    direct = Question(Shape.TEXT, "does D go on", max_tokens=8)
    alone = stage.pair.decode.base_url
    if stage.serves_alone and stage.answer(direct, at=alone).text != stage.right_answer(direct).text:
        raise Missed("D writes something else")
    seconds_until_rest(stage.pair.decode)
    return f"the stream ends well; the next request: {said} after {seconds:.1f} s"


def _said_of(stage: Stage, response: httpx.Response) -> str:
    """Say whether a response that calls itself a success is an answer."""
    try:
        is_right = read([response.content]).text == stage.right_answer(NEXT).text
    except Malformed:
        return " with an error in it"
    if not is_right:
        raise Missed(f"the next request has a wrong answer: {response.text[:120]}")
    return ", a right answer"


def returns(stage: Stage) -> str:
    """P starts again at its address, as another engine: requests are served over it, without a new program."""
    stage.restart_prefill()
    loads = "vllm:prompt_tokens_by_source_total|external_kv_transfer"
    before = counted(stage.pair.decode)[loads]
    starts = itertools.count(30)

    def is_served() -> bool:
        """A prompt of its own each time: what D has in its cache is not loaded."""
        start = next(starts)
        prompt = tuple(range(start, start + 100))
        question = Question(Shape.IDS, prompt, stream=True, max_tokens=8, logprobs=False)
        try:
            if stage.answer(question).text != stage.right_answer(question).text:
                return False
        except (Missed, httpx.HTTPError):
            return False
        return counted(stage.pair.decode)[loads] > before

    return f"served after {seconds_until(is_served, BACK_S, 'no KV comes from it'):.1f} s"


def _long(start: str, tokens: int) -> Question:
    return Question(Shape.TEXT, start, stream=True, max_tokens=tokens, fields={"ignore_eos": True}, logprobs=False)


PROPERTIES: dict[str, Callable[[Stage], str]] = {
    "equal": equal,
    "moved": moved,
    "n = 2": choices,
    "arrays": arrays,
    "errors": errors,
    "client leaves": leaves,
    "P dies": dies,
    "P returns": returns,
}
