"""Features of the API: seeds, structured outputs, tools, several answers, adapters, images."""

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

from pdrelay_tools.proving.bench import Bench, CheckSkipped
from pdrelay_tools.proving.check import Check, CheckResult
from pdrelay_tools.proving.core.question import Json, Question, Shape
from pdrelay_tools.proving.services import EnginePairs

# vLLM's CPU build dies of a seeded prompt that is computed in chunks ("CPU Generator does not use
# offset"): short ones.
_WORDS: Final = 20
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo", "Lima"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


async def _compare_served(bench: Bench, questions: Sequence[Question], missing: str) -> CheckResult:
    """Compare the questions that the reference serves; raises CheckSkipped: none."""
    await bench.right_answers(questions)
    served = [question for question in questions if not bench.is_refused(question)]
    if not served:
        raise CheckSkipped(missing)
    unserved = len(questions) - len(served)
    notes = (
        [f"{unserved} of {len(questions)} kinds are not served by the reference."]
        if unserved
        else []
    )
    return CheckResult(await bench.compare(served), notes)


def _question(
    bench: Bench, shape: Shape, fields: Mapping[str, object], *, stream: bool = False
) -> Question:
    return Question(shape, bench.prompts.text(_WORDS), stream=stream, fields=fields)


async def seeds(bench: Bench) -> CheckResult:
    """Sample with a seed: the same tokens as the reference draws."""
    drawn = {"temperature": 0.8, "top_p": 0.95, "seed": 11}
    questions = [
        _question(bench, shape, drawn | {"seed": seed}, stream=stream)
        for seed in (1, 2)
        for shape in (Shape.TEXT, Shape.CHAT)
        for stream in (False, True)
    ]
    return await _compare_served(bench, questions, "the reference does not sample with seeds")


async def sampling(bench: Bench) -> CheckResult:
    """Set the sampling fields, whose state begins with the prefill engine's token."""
    kinds: list[dict[str, object]] = [
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"stop": ["e"]},
        {"stop": ["e"], "include_stop_str_in_output": True},
        {"min_tokens": 12},
        {"logit_bias": {"40": 5, "41": 5}},
        {"max_tokens": 1},
        {"ignore_eos": True, "max_tokens": 48},
    ]
    questions = [
        _question(bench, Shape.TEXT, fields, stream=number % 2 == 1)
        for number, fields in enumerate(kinds)
    ]
    return await _compare_served(bench, questions, "the reference takes none of these fields")


async def structures(bench: Bench) -> CheckResult:
    """Ask for answers that a grammar allows: the first token is masked, too."""
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA}}
    kinds: list[dict[str, object]] = [
        {"response_format": schema, "max_tokens": 40},
        {"response_format": {"type": "json_object"}, "max_tokens": 24},
        {"structured_outputs": {"choice": ["north", "south"]}},
        {"structured_outputs": {"regex": "[a-c]{6}"}},
    ]
    questions = [
        _question(bench, shape, fields, stream=stream)
        for fields in kinds
        for shape, stream in ((Shape.TEXT, False), (Shape.CHAT, True))
    ]
    return await _compare_served(bench, questions, "the reference has no structured outputs")


async def tools(bench: Bench) -> CheckResult:
    """Have a tool called."""
    named = {"type": "function", "function": {"name": "look_up"}}
    questions = [
        _question(
            bench,
            Shape.CHAT,
            {"tools": [_TOOL], "tool_choice": choice, "max_tokens": 48},
            stream=stream,
        )
        for choice in (named, "required", "auto", "none")
        for stream in (False, True)
    ]
    return await _compare_served(bench, questions, "the reference has no tools")


async def several_answers(bench: Bench) -> CheckResult:
    """Ask for several answers to one prompt, and for answers to several prompts."""
    if isinstance(bench.service, EnginePairs):
        raise CheckSkipped("how they are divided is a router's affair: it needs --router")
    questions = [
        _question(bench, Shape.TEXT, {"n": 2, "temperature": 0.8, "seed": 3}),
        _question(bench, Shape.CHAT, {"n": 2, "temperature": 0.8, "seed": 4}, stream=True),
        Question(Shape.TEXT, "", fields={"prompt": [bench.prompts.text(_WORDS) for _ in range(3)]}),
        _question(bench, Shape.TEXT, {"echo": True}),
    ]
    return await _compare_served(bench, questions, "the reference gives one answer to one prompt")


async def adapters(bench: Bench) -> CheckResult:
    """Ask each LoRA adapter what the base model is asked, too: one's KV is not the other's."""
    if not bench.facts.adapters:
        raise CheckSkipped("no adapter is listed")
    questions: list[Question] = []
    for name in bench.facts.adapters[:4]:
        prompt = bench.prompts.ids(3 * bench.block_size + 5)
        questions += [
            Question(Shape.IDS, prompt, model=model) for model in (None, name, None, name)
        ]
    # vLLM 0.32's CPU kernels answer the base model wrongly in a step with an adapter's requests,
    # and cache that KV.
    for question in questions:
        await bench.right_answer(question)
    return await _compare_served(bench, questions, "the reference does not have the adapters")


async def images(bench: Bench) -> CheckResult:
    """Show images, of which a prompt has one or two."""
    questions: list[Question] = []
    for number, colours in enumerate(
        (((200, 30, 30),), ((30, 30, 200),), ((200, 30, 30), (30, 200, 30)))
    ):
        shown: list[Json] = [
            {"type": "image_url", "image_url": {"url": _picture(colour)}} for colour in colours
        ]
        text_part: Json = {"type": "text", "text": bench.prompts.text(_WORDS)}
        message: Json = {"role": "user", "content": [*shown, text_part]}
        questions.append(Question(Shape.CHAT, (message,), stream=number % 2 == 1))
    return await _compare_served(bench, questions, "the model takes no images")


def _picture(colour: tuple[int, int, int]) -> str:
    """Return a picture of 32 x 32 points in one colour, as a data URL (PNG)."""
    rows = b"".join(b"\0" + bytes(colour) * 32 for _ in range(32))
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", 32, 32, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return (
        "data:image/png;base64,"
        + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
    )


CHECKS = (
    Check("seeds", "features", "sampling with a seed", seeds, needs_reference=True),
    Check(
        "sampling", "features", "fields that shape what is sampled", sampling, needs_reference=True
    ),
    Check("structures", "features", "structured outputs", structures, needs_reference=True),
    Check("tools", "features", "tool calls", tools, needs_reference=True),
    Check(
        "several-answers",
        "features",
        "several answers and prompts",
        several_answers,
        needs_reference=True,
    ),
    Check("adapters", "features", "LoRA adapters", adapters, needs_reference=True),
    Check("images", "features", "images in prompts", images, needs_reference=True),
)
