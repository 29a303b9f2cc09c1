"""A hundred English questions through a running `make up`, and to one engine alone: are the answers
equal?

``.venv/bin/python -m benchmarks.answers.ask`` beside a `make up` asks the router at port 8000, and
the decode engine at port 8200 by itself: a cache salt of its own makes it compute the whole prompt.
Greedy; one request at a time.

``--compare`` chooses what must be equal: texts; texts with the log-likelihood of each token and of
its four rivals; or objects that a JSON schema asks for, which must also be valid.
"""

import argparse
import json
import statistics
import sys
import time
import uuid

import httpx
from jsonschema import Draft202012Validator

from pdrelay_tools.served_by import metric_total, parse_server_timing


def _listed(text):
    return " ".join(text.split()).split(", ")


COUNTRIES = _listed("""
France, Spain, Italy, Germany, Japan, Egypt, Canada, Brazil, India, China, Kenya, Norway,
Greece, Peru, Poland, Portugal, Austria, Turkey, Cuba, Ireland
""")
THINGS = _listed("""
the sky blue, the sea salty, grass green, snow white, ice slippery, bread soft, glass clear, the
moon bright, iron heavy, honey sweet, fire hot, the desert dry, winter cold, rust red, milk
white, coffee bitter, silk smooth, sand loose, the wind strong, gold rare
""")
TRADES = _listed("""
a baker, a sailor, a teacher, a doctor, a carpenter, a farmer, a pilot, a judge, a tailor, a
fisherman, a librarian, a gardener, a mason, a postman, a cook, a painter, a nurse, a
blacksmith, a shepherd, an astronomer
""")
NOUNS = _listed("""
a river, a bridge, a volcano, a library, a train, a clock, an island, a forest, a magnet, a
telescope, a bicycle, a battery, an orchestra, a glacier, a compass, a harbour, a desert, a
parliament, a harvest, a lighthouse
""")
ANIMALS = _listed("""
bees, wolves, owls, salmon, camels, ants, dolphins, bats, penguins, spiders, horses, elephants,
frogs, storks, squirrels, octopuses, lions, tortoises, beavers, swallows
""")
QUESTIONS = (
    *(f"What is the capital of {country}?" for country in COUNTRIES),
    *(f"Why is {thing}?" for thing in THINGS),
    *(f"Write two sentences about the morning of {trade}." for trade in TRADES),
    *(
        f"Explain to a child in a few words what {noun} is, and name one that is famous."
        for noun in NOUNS
    ),
    *(
        f"What do {animals} eat, and how do they find it? Answer in a short list."
        for animals in ANIMALS
    ),
)


CITY = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "maxLength": 30},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
        "by_the_sea": {"type": "boolean"},
    },
    "required": ["capital", "continent", "by_the_sea"],
    "additionalProperties": False,
}
LIKELIHOODS = {"logprobs": True, "top_logprobs": 5}
SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
}


def main():
    args = read_arguments()
    questions, more = {
        "texts": (QUESTIONS, {}),
        "likelihoods": (QUESTIONS, LIKELIHOODS),
        "objects": ([f"Tell me about the capital of {country}." for country in COUNTRIES], SCHEMA),
    }[args.compare]
    with httpx.Client(timeout=300, trust_env=False) as client:
        model = client.get(f"{args.router}/v1/models").raise_for_status().json()["data"][0]["id"]
        before = sum(bytes_moved(client, engine) for engine in args.engine)
        different = []
        whole = 0  # objects that did not end at the limit of tokens: all of these are valid
        times = {"router": [], "alone": []}
        legs = set()
        run = uuid.uuid4().hex  # caches have nothing of an earlier one
        for number, question in enumerate(questions[: args.count]):
            both = more | {"max_tokens": args.max_tokens, "cache_salt": run}
            routed, seconds, header = ask(client, args.router, model, question, both)
            times["router"].append(seconds)
            legs.add(", ".join(sorted({"prefill", "decode"} & parse_server_timing(header).keys())))
            lone = both | {"cache_salt": f"{run} alone"}
            alone, seconds, _ = ask(client, args.engine[-1], model, question, lone)
            times["alone"].append(seconds)
            if args.compare == "objects" and routed["finish_reason"] == "stop":
                whole += 1
                Draft202012Validator(CITY).validate(json.loads(routed["text"]))
            if routed != alone:
                different.append(number)
                print(
                    f"{number}: {question}\n  through the router: {routed!r}\n  one engine alone:  "
                    f" {alone!r}"
                )
            elif number % 20 == 0:
                print(f"{number}: {question} {routed['text']!r}")
        moved = sum(bytes_moved(client, engine) for engine in args.engine) - before
    count = min(args.count, len(questions))
    print(
        f"{count - len(different)} of {count} {args.compare} are equal; legs {sorted(legs)}; "
        f"{moved} bytes of KV moved"
    )
    if args.compare == "objects":
        print(f"{whole} of {count} objects are whole and valid")
    print(
        "median seconds of an answer: "
        + ", ".join(f"{who} {statistics.median(t):.2f}" for who, t in times.items())
    )
    sys.exit(bool(different))


def ask(client, url, model, question, options):
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "temperature": 0} | options
    start = time.monotonic()
    answer = client.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
    choice = answer.json()["choices"][0]
    found = {"text": choice["message"]["content"]} | {
        name: choice[name] for name in ("logprobs", "finish_reason")
    }
    return found, time.monotonic() - start, answer.headers.get("server-timing", "")


def bytes_moved(client, engine):
    """Return the bytes of KV that an engine has counted."""
    return metric_total(client.get(f"{engine}/metrics").content) or 0


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--engine",
        nargs="+",
        default=["http://127.0.0.1:8100", "http://127.0.0.1:8200"],
        help="the last is asked alone",
    )
    parser.add_argument("--compare", choices=("texts", "likelihoods", "objects"), default="texts")
    parser.add_argument("--count", type=int, default=len(QUESTIONS))
    parser.add_argument("--max-tokens", type=int, default=48)
    return parser.parse_args()


if __name__ == "__main__":
    main()
