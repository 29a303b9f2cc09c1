"""Chats of several turns through ``pdrelay up`` as it comes: texts of one engine, and hardly a
token computed twice.

It starts ``pdrelay up`` on free ports, holds the chats one after the other, reads the engines'
counters, has one engine answer the same chats alone, and ends what it has started. The exit code is
1 if a goal is missed. Simulated engines (``--engine sim``) have no cache and count nothing: there
it shows texts, and which turns D serves alone.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks import page
from support.cluster import ROOT, free_ports
from support.words import one_token_words

FIRST, LATER, ANSWER = 420, 180, 160  # words: a token each
# words that are used, and their bytes with the space: 180 of them have fewer than 1,500
WORDS, LONGEST = 400, 7
COMPUTED_GOAL, FIRST_TOKEN_GOAL = 1.1, 0.6
START_S = 900
ANSWER_S = 300
REST_S = 30
SOURCE = re.compile(
    r'(?m)^vllm:prompt_tokens_by_source_total\{[^}]*source="local_compute"[^}]*\} (\S+)'
)
GENERATED = re.compile(r"(?m)^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)")


@dataclass
class Turns:
    """What a server has shown. Times are seconds."""

    answers: list = field(default_factory=list)
    firsts: list = field(default_factory=list)  # until the first text, of first turns
    laters: list = field(default_factory=list)  # and of all others
    alone: int = 0  # turns that a decode engine served alone
    new: int = 0  # tokens of prompts and answers, each counted once


def main():
    args = arguments()
    page.end_as_by_ctrl_c()
    with tempfile.TemporaryDirectory(prefix="pdrelay-") as folder:
        ports = free_ports(4)
        up, output = start(args, ports, Path(folder))
        try:
            wait_for(up, output)
            seen = measured(args, *(f"http://127.0.0.1:{port}" for port in ports[:3]))
        finally:
            up.terminate()
            up.wait(60)
    print(json.dumps(seen, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(seen, indent=1) + "\n")
    if missed := goals_missed(seen):
        sys.exit("; ".join(missed))


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--engine", choices=["vllm", "sim"], default="vllm")
    parser.add_argument(
        "--model", help="tiny, or a folder (the model that pdrelay up has by default)"
    )
    parser.add_argument("--out", type=Path, help="a file for what was seen")
    parser.add_argument(
        "up", nargs="*", help="behind --: further arguments of pdrelay up, such as --reuse-kv false"
    )
    return parser.parse_args()


def start(args, ports, folder):
    """Start pdrelay up; return its process and the file with what it prints."""
    flags = ("--port", "--prefill-port", "--decode-port", "--side-channel-port")
    argv = [sys.executable, "-u", "-m", "pdrelay_proxy.cli", "up", "--engine", args.engine]
    argv += [word for flag, port in zip(flags, ports, strict=True) for word in (flag, str(port))]
    argv += ["--model", args.model] if args.model else []
    output = folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            [*argv, *args.up], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
    return process, output


def wait_for(up, output):
    deadline = time.monotonic() + START_S
    while "Ctrl-C stops everything" not in output.read_text():
        if up.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"pdrelay up did not start:\n{output.read_text()}")
        time.sleep(0.5)


def measured(args, router, prefill, decode):
    """Hold the chats over the router, and then with one engine: the prefill engine computes all of
    a prompt itself.
    """
    with httpx.Client(trust_env=False, timeout=ANSWER_S) as client:
        model = client.get(f"{router}/v1/models").json()["data"][0]["id"]
        words = words_of(args, model)
        before = at_rest(client, prefill, decode)
        routed = hold(client, router, model, words, args)
        after = at_rest(client, prefill, decode)
        # a simulated prefill engine takes prefill legs alone
        one = prefill if args.engine == "vllm" else decode
        alone = hold(client, one, model, words, args)
    computed = None if None in (before, after) else after - before
    return {
        "model": model,
        "chats": args.chats,
        "turns": args.turns,
        "texts_equal": sum(a == b for a, b in zip(routed.answers, alone.answers, strict=True)),
        "texts": len(routed.answers),
        "decode_alone": routed.alone,
        "computed_for_each_new": computed and computed / routed.new,
        "first_token_first_ms": 1000 * statistics.median(routed.firsts),
        "first_token_later_ms": 1000 * statistics.median(routed.laters),
        "later_over_first": statistics.median(routed.laters) / statistics.median(routed.firsts),
        "one_engine_later_over_first": statistics.median(alone.laters)
        / statistics.median(alone.firsts),
    }


def goals_missed(seen):
    missed = []
    if seen["texts_equal"] != seen["texts"]:
        missed.append(
            f"{seen['texts'] - seen['texts_equal']} of {seen['texts']} texts differ from one "
            f"engine's"
        )
    if seen["computed_for_each_new"] is None:
        return missed  # simulated: there is no cache, so that no turn is faster than another
    if seen["computed_for_each_new"] > COMPUTED_GOAL:
        missed.append(
            f"{seen['computed_for_each_new']:.3f} tokens computed for each new one, above "
            f"{COMPUTED_GOAL}"
        )
    if seen["later_over_first"] > FIRST_TOKEN_GOAL:
        missed.append(
            f"later first tokens take {seen['later_over_first']:.2f} of the first, above "
            f"{FIRST_TOKEN_GOAL}"
        )
    return missed


def words_of(args, model):
    """Return words by their token: one token each, so that a text has the same tokens in the next
    turn.
    """
    if args.engine == "sim":
        return dict(enumerate((" river", " stone", " cloud", " paper", " north")))
    folder = (
        Path(args.model)
        if args.model and Path(args.model).is_dir()
        else ROOT / ".pdrelay/models" / model
    )
    found = [
        (token, word)
        for token, word in one_token_words(folder).items()
        if len(word.encode()) <= LONGEST
    ]
    return dict(random.Random(7).sample(found, min(WORDS, len(found))))


def hold(client, url, model, words, args):
    """Hold all chats; their caches are apart from those of other runs."""
    turns = Turns()
    run = f"{time.time_ns():x}"
    for chat in range(args.chats):
        dice = random.Random(chat)
        messages = []
        total = 0
        for turn in range(args.turns):
            text = "".join(dice.choices(list(words.values()), k=LATER if turn else FIRST))
            messages.append({"role": "user", "content": text})
            body = {
                "model": model, "messages": messages, "max_tokens": ANSWER, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}, "cache_salt": f"{run}-{chat}", "ignore_eos": True,
            }  # fmt: skip
            body |= {"allowed_token_ids": list(words)} if args.engine == "vllm" else {}
            answer, seconds, total, is_alone = ask(client, url, body)
            messages.append({"role": "assistant", "content": answer})
            turns.answers.append(answer)
            (turns.laters if turn else turns.firsts).append(seconds)
            turns.alone += is_alone
        turns.new += total
    return turns


def ask(client, url, body):
    """Return the text, the seconds until it began, the tokens of the conversation, and whether D
    served it alone.
    """
    text = ""
    seconds = None
    tokens = 0
    start = time.perf_counter()
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            sys.exit(f"{url} answers {answer.status_code}: {answer.read()[:500]}")
        is_alone = "cached_prompt" in answer.headers.get("server-timing", "")
        for line in answer.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            text += "".join(
                choice["delta"].get("content") or "" for choice in event.get("choices", ())
            )
            seconds = seconds or (time.perf_counter() - start if text else None)
            tokens = (event.get("usage") or {}).get("total_tokens", tokens)
    return text, seconds or time.perf_counter() - start, tokens, is_alone


def at_rest(client, *engines):
    """Return the tokens that engines have computed, once that does not change any more; None: they
    do not count.
    """
    last = None
    deadline = time.monotonic() + REST_S
    while time.monotonic() < deadline:
        texts = [client.get(f"{engine}/metrics").text for engine in engines]
        if not any(SOURCE.search(text) for text in texts):
            return None
        now = sum(
            float(value)
            for text in texts
            for name in (SOURCE, GENERATED)
            for value in name.findall(text)
        )
        if now == last:
            return now
        last = now
        time.sleep(1)
    return last


if __name__ == "__main__":
    main()
