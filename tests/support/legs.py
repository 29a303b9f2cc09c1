"""The two legs by hand, for tests that step between them."""

import functools
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from support.questions import ask, client

TOKENS = 16
STALL_TOKENS = 77  # a prompt of exactly so many tokens keeps an engine of support.stalling in one step
STALL_SECONDS = "PDRELAY_TEST_STALL_SECONDS"  # for so long
SLOW_TOKENS, SLOW_SECONDS = 9, 0.05  # and one of so many, or of hundreds more, keeps each of its steps for so long
OPEN = {"do_remote_decode": True, "do_remote_prefill": False}


def prompt_of(number, length=200):
    """Return token ids that share no block with another number's."""
    return [(number * 37 + 11 * i + i * i % (number + 3)) % 470 + 20 for i in range(length)]


def prefill(spec, prompt):
    """Have an engine compute a prompt and return the params for the decode leg."""
    return _post(spec, {"prompt": prompt, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": OPEN}).json()[
        "kv_transfer_params"
    ]


def coordinates(p, d):
    """Return how decode engines reach a prefill engine in push: it says so itself, in any of its answers.

    A decode engine takes what was computed for that, one leg after the other, as a router that knows only pull does.
    """
    prompt = prompt_of(next(_transfers) % 400, 40)
    params = prefill(p, prompt)
    text_of(decode(d, prompt, params, tokens=1))
    return {key: params[key] for key in ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")}


_transfers = itertools.count(1)


def push(p, d, question, where, *, prefill_after=0.0, decode_after=0.0, tokens=TOKENS, **fields):
    """Ask a question over both legs at once, either later by some seconds; returns the answer and D's seconds.

    The prefill leg may wait for an event instead. D is told more in ``fields``.
    """
    transfer = {"transfer_id": f"{os.getpid()}-{next(_transfers)}"}
    lends = OPEN | transfer
    borrows = {"do_remote_prefill": True, "do_remote_decode": False, **transfer, **where}

    def leg(spec, delay, params, **options):
        if isinstance(delay, threading.Event):
            assert delay.wait(60), "nothing has let the leg go"
        else:
            time.sleep(delay)
        started = time.monotonic()
        with client(spec.base_url) as api:
            return ask(api, question, kv_transfer_params=params, **options), time.monotonic() - started

    with ThreadPoolExecutor(2) as pool:
        prefilled = pool.submit(leg, p, prefill_after, lends, tokens=1)
        answered = pool.submit(leg, d, decode_after, borrows, tokens=tokens, **fields)
        prefilled.result()
        return answered.result()


def decode(spec, prompt, params, *, tokens=TOKENS, timeout=120):
    """Ask an engine for the tokens; returns the response, whatever its status."""
    return _post(spec, decode_body(prompt, params, tokens=tokens), timeout=timeout)


def decode_body(prompt, params, *, tokens=TOKENS):
    """Return what :func:`decode` asks, but for the model and the sampling."""
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "kv_transfer_params": params}


def plain(spec, prompt, *, tokens=TOKENS):
    """Ask an engine to do both by itself and return the text."""
    return text_of(_post(spec, {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}))


def text_of(response):
    """Return the text of a completion that succeeded."""
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] != "error", response.text
    return choice["text"]


def _post(spec, body, timeout=120):
    body = {"model": "tiny", "temperature": 0, "seed": 0, **body}
    return _http().post(f"{spec.base_url}/v1/completions", json=body, timeout=timeout)


@functools.cache
def _http():
    """One client for all: a new one takes tens of milliseconds. Engines come and go, so no connection is kept."""
    return httpx.Client(trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
